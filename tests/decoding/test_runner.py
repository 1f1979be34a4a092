"""`diagd/decoding/runner.py`: every runner writes the same tokens."""

import pytest
import torch

import diagd
from diagd.decoding.runner import make_runner
from diagd.models.transformer import Transformer
from tests.decoding.cases import Case, model_of

CPU = torch.device("cpu")


def test_unknown_runner_is_an_error_that_names_the_choices():
    message = r"^runner must be one of eager, compile, cuda-graph, got 'fast'$"
    with pytest.raises(ValueError, match=message):
        make_runner("fast", lambda lanes, num_slots: None, CPU)  # pyright: ignore[reportArgumentType]


def test_cuda_graphs_need_cuda():
    with pytest.raises(ValueError, match=r"^runner cuda-graph needs a CUDA device, got cpu$"):
        make_runner("cuda-graph", lambda lanes, num_slots: None, CPU)


@pytest.mark.parametrize("num_slots", [1, 64, 65, 200])
def test_a_step_reads_at_least_the_slots_in_use(num_slots):
    calls = []
    runner = make_runner("eager", lambda lanes, read: calls.append((lanes, read)), CPU)
    lanes = torch.zeros(8, 3, dtype=torch.int64)
    runner(lanes, num_slots)
    assert calls[0][0] is lanes
    assert calls[0][1] >= num_slots


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor's own
def test_the_compiled_step_writes_what_eager_writes():
    for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
        eager, compiled = (
            diagd.generate_tokens(
                model_of("own"), case.prompt, case.schedule, case.actions(), runner=runner
            ).tokens
            for runner in ("eager", "compile")
        )
        assert torch.equal(eager, compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("runner", ["compile", "cuda-graph"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fast_runners_write_what_eager_writes(runner, temperature):
    model = model_of("own")
    assert isinstance(model, Transformer)
    model.to("cuda")
    sampling = diagd.SamplingOptions(temperature)
    try:
        for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
            actions = case.actions()
            actions = None if actions is None else actions.to("cuda")
            eager, fast = (
                diagd.generate_tokens(
                    model,
                    case.prompt.to("cuda"),
                    case.schedule,
                    actions,
                    sampling=sampling,
                    runner=name,
                ).tokens
                for name in ("eager", runner)
            )
            assert torch.equal(eager, fast)
    finally:
        model.to("cpu")
