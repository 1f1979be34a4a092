"""`diagd/backends/replay.py`, with Inductor, which writes C++ on a CPU.

Compiled steps that are captured: `tests/gpu/test_compiled.py`.
"""

import weakref

import pytest
import torch
from torch import Tensor

import diagd
from diagd.backends.replay import Captured, Compiled, compile_for_one_shape
from diagd.decoding.model import ModelWrapper
from diagd.decoding.step import run_step
from diagd.models.transformer import Transformer
from tests.decoding.cases import Case
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
CASE = Case(num_frames=1, num_action_tokens=2, batch_size=1)


@pytest.fixture
def traced(monkeypatch):
    """Steps are traced, and then run as they are; returns the shapes of what was traced."""
    compiled, shapes = torch.compile, []

    def trace(graph, inputs):
        shapes.append(tuple(inputs[0].shape))
        return graph

    def stand_in(function, options, **flags):
        return compiled(function, backend=trace, **flags)

    monkeypatch.setattr(torch, "compile", stand_in)
    return shapes


def double(x: Tensor) -> None:
    x.mul_(2)


def test_each_shape_is_compiled_once_however_many_there_are(traced):
    """The limit of torch.compile is 8 of one function."""
    tensors = [torch.ones(2, 3 + size) for size in range(12)]
    compiled = [compile_for_one_shape(double) for _ in tensors]
    for _ in range(3):
        for one, tensor in zip(compiled, tensors, strict=True):
            one(tensor)
    assert traced == [tuple(tensor.shape) for tensor in tensors]
    assert all((tensor == 8).all() for tensor in tensors)


def test_what_was_compiled_keeps_nothing_of_a_call_and_goes_when_dropped(no_collection, traced):
    tensor, compiled = torch.ones(2, 5), compile_for_one_shape(double)
    compiled(tensor)
    given, code = weakref.ref(tensor), weakref.ref(compiled)
    del tensor
    assert given() is None
    del compiled
    assert code() is None


def test_what_cannot_be_compiled_is_one_line(traced):
    def waits(x: Tensor) -> None:
        print(x)

    message = r"^torch\.compile cannot compile a step here \(.+\): use a backend that does not"
    with pytest.raises(ValueError, match=message) as caught:
        compile_for_one_shape(waits)(torch.ones(2, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_steps_compiled_for_their_shapes_write_the_tokens_of_eager_ones():

    class ByShape(Compiled[Transformer]):
        def make_step(self, step):
            def run(steps, _num_slots, _first=0):
                (lanes,) = steps
                if lanes.shape not in compiled:
                    compiled[lanes.shape] = compile_for_one_shape(run_step)
                compiled[lanes.shape](self.model, step, lanes, 64)

            return run

    decoded, compiled = [], {}
    for make in (lambda model: model, ByShape):
        engine = diagd.DecodingEngine(
            make(tiny_model(num_layers=1)),
            diagd.FrameFormat(CASE.height, CASE.width, CASE.num_action_tokens),
            batch_size=CASE.batch_size,
            sampling=diagd.SamplingOptions(1.0, top_p=0.8, valid_range=(0, 18)),
            seed=3,
        )
        engine.prefill(CASE.prompt, CASE.context_frames)
        actions = CASE.actions()
        assert actions is not None
        decoded.append(torch.stack(list(engine.decode("k=1", actions))))
        assert bool(compiled) == (make is ByShape)
    assert torch.equal(*decoded)


def test_cuda_graphs_need_cuda():
    with pytest.raises(ValueError, match=r"^backend cuda-graph needs --device cuda, got cpu$"):
        Captured(tiny_model())


def test_padded_steps_write_what_bare_steps_write():
    class Padded(ModelWrapper[Transformer]):
        def __init__(self, model):
            super().__init__(model)
            self.replays = True

    for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
        written, fed = [], []
        for model in (tiny_model(), Padded(tiny_model())):
            engine = diagd.DecodingEngine(
                model,
                diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
                batch_size=len(case.prompt),
            )
            engine.prefill(case.prompt, case.context_frames)
            written.append(torch.stack(list(engine.decode(case.schedule, case.actions()))))
            fed.append(engine.stream.num_fed)
        assert torch.equal(*written)
        assert fed[0] == fed[1]  # padding is not counted
