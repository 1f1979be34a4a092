"""Captured steps with our Triton kernels, on the pretended GPU; the interpreter runs them.

make test-triton
"""

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diagd.backends import prepare as backends
from diagd.backends.linears import merge_linears, round_linears
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured
from diagd.backends.triton import model
from diagd.backends.triton.model import TritonModel
from tests.backends.conformance import NUM_SLOTS, random_steps
from tests.backends.triton.interpreter import INTERPRETS
from tests.decoding.cases import Case
from tests.gpu.test_tokens import SAMPLINGS, by_place, decode, tiny

from diagd.backends.triton import attention  # isort: skip
from diagd.backends.triton.launching import starts_early  # isort: skip

simulated = pytest.mark.skipif(not INTERPRETS, reason="only where nothing is compiled")
CASE = Case(num_frames=2, num_action_tokens=2, batch_size=1)


class Launch:
    """A kernel as an operation that the pretended GPU can record; it writes to its arguments."""

    _schema = SimpleNamespace(is_mutable=True, name="triton::kernel")
    is_view = False

    def __init__(self, run: Callable[..., Any], kernel: Any) -> None:
        self.run, self.kernel = run, kernel

    def __call__(self, *given: Any, **settings: Any) -> None:
        self.run(self.kernel, *given, **settings)


@pytest.fixture(autouse=True)
def _launched(request, monkeypatch):
    """Launch kernels on the memory behind the tensors of the pretended GPU."""
    if "gpus" not in request.fixturenames:
        return
    from triton.runtime.interpreter import (  # pyright: ignore[reportMissingImports]
        InterpretedFunction,
    )

    machine, run = request.getfixturevalue("gpus"), InterpretedFunction.run

    def launch(kernel, *given, **settings):
        given, settings = machine._unwrap(given), machine._unwrap(settings)
        one, capture = Launch(run, kernel), machine.capture
        machine.num_kernels += 1
        if capture is None or capture.stream is not machine.streams[capture.stream.index]:
            one(*given, **settings)
        else:
            capture.record(one, given, settings)

    monkeypatch.setattr(InterpretedFunction, "run", launch)


@simulated
@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        ("k=1", "top-p"),
        pytest.param("k=2,d=4", "greedy", marks=pytest.mark.slow),
        pytest.param("exact,lanes=8", "sampled", marks=pytest.mark.slow),
    ],
)
def test_captured_steps_write_the_tokens_of_the_cpu(strategy, sampling, gpus):
    options = dataclasses.replace(SAMPLINGS[sampling], valid_range=by_place(CASE))
    model, backend = prepare(tiny().to("cuda"))
    assert isinstance(model, Captured)
    assert (type(model.model), backend) == (TritonModel, "triton")
    found = decode(model, CASE, strategy, options, "cuda")
    expected = decode(tiny(), CASE, strategy, options)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert gpus.num_replays > 0


@simulated
@pytest.mark.slow
def test_a_stream_goes_on_under_its_window(gpus):
    """Slots are a ring: positions, not slots, say who is earlier."""
    case = dataclasses.replace(CASE, num_frames=3)
    room: dict[str, Any] = {"max_positions": 40}  # two frames
    model, _ = prepare(tiny(**room).to("cuda"), "triton")
    found = decode(model, case, "k=1", SAMPLINGS["sampled"], "cuda")
    expected = decode(tiny(**room), case, "k=1", SAMPLINGS["sampled"])
    assert torch.equal(found.tokens.cpu(), expected.tokens)


@simulated
def test_where_the_kernels_are_wrong_pytorchs_run_and_say_so(gpus, monkeypatch, caplog):
    monkeypatch.setattr(attention, "LOG2_E", 1.0)
    model.check_kernels.cache_clear()
    backends._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "diagd"):
        assert prepare(tiny().to("cuda"))[1] == "cuda-graph"
    assert len(caplog.records) == 1
    assert "PyTorch's kernels (backend cuda-graph)" in caplog.text
    with pytest.raises(ValueError, match=r"^backend triton: Triton kernels failed their test"):
        prepare(tiny().to("cuda"), "triton")
    model.check_kernels.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["llama", "wham", "cosmos", "glm-image"])
def test_kernels_that_start_early_compute_the_same_bits(kind, int8):
    """Steps one after another, so that each kernel has one before it to wait for."""
    device = torch.device("cuda")
    if not starts_early(device):
        pytest.skip("no kernel starts early on this GPU")
    found = []
    for dependent in (False, True):
        plain = tiny(kind, num_layers=4, hidden_size=512, intermediate_size=2048)
        merged = merge_linears(plain.to(device, torch.bfloat16), pack=False)
        merged = round_linears(merged, torch.bfloat16) if int8 else merged
        model = Captured(TritonModel(merged, dependent))
        found.append(decode(model, CASE, "k=1", SAMPLINGS["sampled"], "cuda").tokens)
        cache = model.make_cache(2, NUM_SLOTS)
        logits = [model.forward(**step, cache=cache) for step in random_steps(model)]
        found.append(torch.cat([one.flatten() for one in (*logits, *cache.keys, *cache.values)]))
    tokens, numbers, early_tokens, early_numbers = found
    assert torch.equal(tokens, early_tokens)
    assert torch.equal(numbers, early_numbers)
