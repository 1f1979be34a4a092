"""`diagd/decoding/compiling.py`, with Inductor, which writes C++ on a CPU.

Compiled steps that are captured: `tests/gpu/test_compiled.py`.
"""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import diagd
from diagd.decoding.compiling import compile_for_one_shape
from diagd.decoding.engine import Step
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


def test_what_was_compiled_keeps_nothing_of_a_call_and_goes_when_dropped(traced):
    gc.collect()
    gc.disable()
    try:
        tensor, compiled = torch.ones(2, 5), compile_for_one_shape(double)
        compiled(tensor)
        given, code = weakref.ref(tensor), weakref.ref(compiled)
        del tensor
        assert given() is None
        del compiled
        assert code() is None
    finally:
        gc.enable()


def test_what_cannot_be_compiled_is_one_line(traced):
    def waits(x: Tensor) -> None:
        print(x)

    message = r"^torch\.compile cannot compile a step here \(.+\): choose a backend that does not"
    with pytest.raises(ValueError, match=message) as caught:
        compile_for_one_shape(waits)(torch.ones(2, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_steps_compiled_for_their_shapes_write_the_tokens_of_eager_ones():
    decoded = []
    for is_compiled in (False, True):
        engine = diagd.DecodingEngine(
            tiny_model(num_layers=1),
            CASE.height,
            CASE.width,
            num_action_tokens=CASE.num_action_tokens,
            batch_size=CASE.batch_size,
            sampling=diagd.SamplingOptions(1.0, top_p=0.8, valid_range=(0, 18)),
            seed=3,
        )
        engine.pad = True
        step = Step(engine.model, engine.space, engine.sampling, engine.ranges)
        compiled = {}

        def run(lanes, num_slots, step=step, compiled=compiled):
            if lanes.shape[1] not in compiled:
                compiled[lanes.shape[1]] = compile_for_one_shape(Step.take)
            compiled[lanes.shape[1]](step, lanes, 64)

        if is_compiled:
            engine.run = torch.inference_mode()(run)
        engine.prefill(CASE.prompt, CASE.context_frames)
        actions = CASE.actions()
        assert actions is not None
        decoded.append(torch.stack(list(engine.decode("k=1", actions))))
        assert bool(compiled) == is_compiled
    assert torch.equal(*decoded)
