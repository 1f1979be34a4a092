"""`diagd/decoding/runner.py`: every runner writes the same tokens."""

import contextlib
from unittest.mock import MagicMock

import pytest
import torch

import diagd
from diagd.decoding.engine import DecodingEngine
from diagd.decoding.runner import CudaGraphRunner, make_runner
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


def test_padded_steps_write_what_bare_steps_write():
    for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
        written = []
        for pad in (False, True):
            engine = DecodingEngine(
                model_of("own"),
                case.height,
                case.width,
                num_action_tokens=case.num_action_tokens,
                batch_size=len(case.prompt),
            )
            engine.pad = pad
            engine.prefill(case.prompt, case.context_frames)
            written.append(torch.stack(list(engine.decode(case.schedule, case.actions()))))
        assert torch.equal(*written)


class FakeGraph:
    """Captures the calls of a step function, and replays them on the same tensors."""

    recording: "FakeGraph | None" = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for step, lanes, num_slots in self.calls:
            step(lanes, num_slots)

    def pool(self):
        return "pool"


@pytest.fixture
def fake_cuda(monkeypatch):
    """Graphs, streams and the capture of torch.cuda, in Python; returns the pools asked for."""
    pools = []

    @contextlib.contextmanager
    def capture(graph, pool=None):
        pools.append(pool)
        FakeGraph.recording = graph
        yield
        FakeGraph.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock)
    return pools


def test_a_graph_is_captured_once_a_shape_and_replayed_on_its_own_lanes(fake_cuda):
    """A capture records without running; a replay runs on the very tensors that were recorded."""
    ran = []

    def step(lanes, num_slots):
        if FakeGraph.recording is not None:
            FakeGraph.recording.calls.append((step, lanes, num_slots))
        else:
            ran.append((lanes.tolist(), num_slots))

    runner = CudaGraphRunner(step)
    first, second = torch.arange(16).view(8, 2), torch.arange(16).view(8, 2) + 100
    wide = torch.arange(32).view(8, 4)
    for lanes, num_slots in ((first, 1), (second, 512), (wide, 512), (first, 513), (second, 2)):
        runner(lanes, num_slots)
    warm_ups = [(first, 512), (wide, 512), (first, 1024)]
    replays = [(first, 512), (second, 512), (wide, 512), (first, 1024), (second, 512)]
    order = [warm_ups[0], *replays[:2], warm_ups[1], replays[2], warm_ups[2], *replays[3:]]
    assert ran == [(lanes.tolist(), num_slots) for lanes, num_slots in order]
    assert set(runner.graphs) == {(2, 512), (4, 512), (2, 1024)}
    assert fake_cuda == [None, "pool", "pool"]  # all graphs share one pool of memory
    assert first.tolist() == torch.arange(16).view(8, 2).tolist()  # the caller's lanes are copied


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
