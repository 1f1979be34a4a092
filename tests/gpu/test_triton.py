"""Captured steps with our Triton kernels, on the pretended GPU; the interpreter runs them.

make test-triton
"""

import dataclasses
import logging
from typing import Any

import pytest
import torch

from diagd.backends import prepare as backends
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured
from diagd.backends.triton import model
from diagd.backends.triton.model import TritonModel
from tests.backends.triton.interpreter import INTERPRETS
from tests.decoding.cases import Case
from tests.gpu.test_compiled import compiler  # noqa: F401  (a fixture)
from tests.gpu.test_tokens import SAMPLINGS, by_place, decode, tiny

from diagd.backends.triton import attention  # isort: skip

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="only where nothing is compiled")
CASE = Case(num_frames=2, num_action_tokens=2, batch_size=1)


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [("k=1", "greedy"), ("k=2,d=4", "top-p"), ("exact,lanes=8", "sampled")],
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


def test_the_backend_that_compiles_captures_compiled_steps(compiler):  # noqa: F811
    """With our kernels in them."""
    options = dataclasses.replace(SAMPLINGS["top-p"], valid_range=by_place(CASE))
    model, _ = prepare(tiny(num_layers=1).to("cuda"), "compiled-graph")
    assert isinstance(model, Captured)
    assert (type(model.model), model.compiled) == (TritonModel, True)
    found = decode(model, CASE, "k=1", options, "cuda")
    expected = decode(tiny(num_layers=1), CASE, "k=1", options)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert compiler.num_compiled == compiler.machine.num_captures > 0


def test_a_stream_goes_on_under_its_window(gpus):
    """Slots are a ring: positions, not slots, say who is earlier."""
    case = dataclasses.replace(CASE, num_frames=3)
    room: dict[str, Any] = {"max_positions": 40}  # two frames
    model, _ = prepare(tiny(**room).to("cuda"), "triton")
    found = decode(model, case, "k=1", SAMPLINGS["sampled"], "cuda")
    expected = decode(tiny(**room), case, "k=1", SAMPLINGS["sampled"])
    assert torch.equal(found.tokens.cpu(), expected.tokens)


def test_where_the_kernels_are_wrong_pytorchs_run_and_say_so(gpus, monkeypatch, caplog):
    monkeypatch.setattr(attention, "LOG2_E", 1.4)
    model.load_kernels.cache_clear()
    backends._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "diagd"):
        assert prepare(tiny().to("cuda"))[1] == "cuda-graph"
    assert len(caplog.records) == 1
    assert "PyTorch's kernels (backend cuda-graph)" in caplog.text
    with pytest.raises(ValueError, match=r"^backend triton: Triton kernels failed their test"):
        prepare(tiny().to("cuda"), "triton")
    model.load_kernels.cache_clear()
