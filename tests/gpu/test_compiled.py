"""Steps compiled whole and then captured, on the pretended GPU: the tokens of the CPU.

Dynamo traces the steps and AOTAutograd makes graphs of single operations of them, as on CUDA.
Those operations run on the pretended GPU; what Inductor would fuse them to needs a real one
(`tests/backends/test_conformance.py` runs it on a CPU).
"""

import importlib
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diagd
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured, compile_for_one_shape
from diagd.decoding.visibility import Seen
from diagd.models.transformer import Transformer
from tests.decoding.cases import Case
from tests.gpu.machine import GpuTensor
from tests.gpu.test_rules import captured
from tests.gpu.test_tokens import CASE, SAMPLINGS, by_place, decode, prepare_for, stream, tiny


def captured_compiled(model, device):
    """A model whose steps are compiled, then captured."""
    return Captured(prepare_for(model, device).model, compiled=True)


class Compiler:
    """Stands in for `torch.compile` with Inductor.

    Attributes:
        num_compiled: graphs that it was given.
        flags: those of each call.
    """

    def __init__(self, machine):
        self.machine, self.num_compiled, self.flags = machine, 0, []
        self.compile = torch.compile

    def __call__(self, function, options, **flags):
        self.flags.append({**flags, **options})
        return self.compile(function, backend=self.make, **flags)

    def make(self, traced, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        if self.machine.capture is not None:
            raise RuntimeError("compiled while a graph is captured")
        self.num_compiled += 1
        return aot_eager(traced, inputs)


@pytest.fixture
def compiler(gpus, monkeypatch):
    """A compiler that traces the tensors of the pretended GPU as if they were plain ones."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        pytest.skip("this torch compiles nothing under a dispatch mode")
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    is_traceable = builder.is_traceable_wrapper_subclass

    def is_taken(tensor):
        asking = sys._getframe(1).f_code.co_name
        plain = type(tensor) is GpuTensor and asking in ("_wrap", "infer_subclass_type")
        return plain or is_traceable(tensor)

    monkeypatch.setattr(builder, "is_traceable_wrapper_subclass", is_taken)
    compiler = Compiler(gpus)
    monkeypatch.setattr(torch, "compile", compiler)
    return compiler


def small(kind="llama", **changes):
    """A model of one layer: compiling takes its time."""
    return tiny(kind, num_layers=1, **changes)


def writes_the_tokens_of_the_cpu(compiler, kind, strategy, sampling, device="cuda"):
    model = captured_compiled(small(kind), device)
    found = decode(model, CASE, strategy, sampling, device)
    expected = decode(small(kind), CASE, strategy, sampling)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert found.stats.num_steps == expected.stats.num_steps
    assert compiler.num_compiled == compiler.machine.num_captures > 0
    assert compiler.machine.num_replays == found.stats.num_steps


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        ("k=1", "top-p"),
        ("exact,lanes=8", "sampled"),
        pytest.param("exact,lanes=9", "top-k", marks=pytest.mark.slow),
        pytest.param("zipar=2", "exclusive", marks=pytest.mark.slow),
    ],
)
def test_captured_compiled_steps_write_the_tokens_of_the_cpu(strategy, sampling, compiler):
    writes_the_tokens_of_the_cpu(compiler, "llama", strategy, SAMPLINGS[sampling])
    asked = {"fullgraph": True, "dynamic": False, "triton.cudagraphs": False}
    assert compiler.flags == [asked] * compiler.num_compiled


@pytest.mark.parametrize(
    "kind", [pytest.param("multi-query", marks=pytest.mark.slow), "cosmos", "wham"]
)
def test_every_position_and_norm_compiles(kind, compiler):
    places = diagd.SamplingOptions(1.0, valid_range=by_place(CASE))
    writes_the_tokens_of_the_cpu(compiler, kind, "k=1", places, "cuda:1")


def test_a_stream_goes_on_under_its_window(compiler):
    case = Case(num_frames=5, num_action_tokens=2)
    decoded = []
    for device in ("cpu", "cuda"):
        model = prepare_for(small(max_positions=64), device)
        model = Captured(model.model, compiled=True) if device == "cuda" else model
        words = ("k=1", "raster", "k=1", "raster", "k=1")
        found = stream(case, words, model, device)
        assert found.num_dropped_frames >= 2
        decoded.append(found.tokens)
    assert torch.equal(*decoded)
    assert compiler.num_compiled == compiler.machine.num_captures


def test_the_same_steps_captured_as_they_are_have_graphs_of_their_own(compiler):
    plain = prepare_for(small(), "cuda")
    compiled = Captured(plain.model, compiled=True)
    for model, num_captures, num_compiled in (
        (plain, 2, 0),  # a step, and the steps of a frame
        (compiled, 1, 1),
        (plain, 0, 1),
        (compiled, 0, 1),
    ):
        before = compiler.machine.num_captures
        stats = decode(model, CASE, "k=1", SAMPLINGS["sampled"], "cuda").stats
        assert compiler.machine.num_captures - before == num_captures
        assert compiler.num_compiled == num_compiled
        assert (stats.capture_seconds > 0) == (num_captures > 0)


def test_a_dropped_model_drops_its_memory_at_once(no_collection, compiler):
    """What was compiled holds neither the step nor its memory."""
    model = captured_compiled(small(), "cuda")
    decode(model, CASE, "k=1", SAMPLINGS["sampled"], "cuda")
    del model
    assert compiler.machine.live_bytes == 0


def test_compiling_during_a_capture_is_caught(compiler):
    x = torch.ones(3, device="cuda")
    code = compile_for_one_shape(lambda x: x.add_(1))
    with pytest.raises(ValueError, match="compiled while a graph is captured"):
        captured(lambda: code(x))
    assert compiler.num_compiled == 0


def test_a_step_that_cannot_be_compiled_is_one_line(compiler, monkeypatch):
    mask = Seen.mask

    def waiting(self):
        assert int(self.positions.max()) >= 0
        return mask(self)

    monkeypatch.setattr(Seen, "mask", waiting)
    with pytest.raises(ValueError, match=r"^torch\.compile cannot compile a step here \(.*cuda-gr"):
        writes_the_tokens_of_the_cpu(compiler, "llama", "k=1", SAMPLINGS["greedy"])


def test_the_backend_captures_compiled_steps_of_pytorchs_kernels(compiler, monkeypatch):
    monkeypatch.setattr("diagd.backends.prepare.why_not_on", lambda _: None)  # without Triton, too
    model: Any = prepare(small().to("cuda"), "compiled-graph")[0]
    assert (type(model.model), model.compiled) == (Transformer, True)


def test_the_backend_needs_what_our_kernels_need(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=r"^backend compiled-graph: .*(not installed|8\.0)"):
        prepare(tiny().to("cuda"), "compiled-graph")
