"""Weights of 8 bits on the pretended GPU: the tokens of the same rounded model on the CPU."""

from functools import cache
from typing import Any

import pytest
import torch

from diagd.backends.linears import Int8Linear, merge_linears, round_linears
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured
from diagd.data.video import read_video
from diagd.models.transformer import Transformer
from tests.gpu.test_compiled import compiler  # noqa: F401  (a fixture)
from tests.gpu.test_tokens import CASE, SAMPLINGS, decode, tiny

SAMPLED = SAMPLINGS["sampled"]


@cache
def on_the_cpu(kind, strategy):
    model = round_linears(merge_linears(tiny(kind), pack=False), torch.bfloat16)
    return decode(model, CASE, strategy, SAMPLED).tokens


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("kind", ["llama", "wham"])
def test_captured_steps_write_the_tokens_of_the_cpu(kind, backend, gpus):
    model, named = prepare(tiny(kind).to("cuda"), backend, int8=True)
    plain = model.model if isinstance(model, Captured) else model
    assert isinstance(plain, Transformer)
    assert named == ("cuda-graph" if backend == "auto" else backend)
    assert any(isinstance(module, Int8Linear) for module in plain.modules())
    for strategy in ("k=1", "exact,lanes=8"):
        found = decode(model, CASE, strategy, SAMPLED, "cuda")
        assert torch.equal(found.tokens.cpu(), on_the_cpu(kind, strategy))
    assert (gpus.num_replays > 0) == model.replays


def test_compiled_steps_are_captured_as_well(compiler):  # noqa: F811
    model: Any = prepare(tiny().to("cuda"), "cuda-graph", int8=True)[0]
    compiled = Captured(model.model, compiled=True)
    found = decode(compiled, CASE, "k=1", SAMPLED, "cuda")
    assert torch.equal(found.tokens.cpu(), on_the_cpu("llama", "k=1"))
    assert compiler.num_compiled == compiler.machine.num_captures > 0


def test_memory_is_a_quarter_of_float32s(gpus):
    plain = tiny(hidden_size=240, intermediate_size=400).to("cuda")
    table = plain.model.embed_tokens.weight.nbytes
    before = gpus.live_bytes - table
    model = prepare(plain, "cuda-graph", int8=True)[0]
    assert gpus.live_bytes - table // 2 < 0.27 * before
    del model


def test_the_command_takes_it(world, tmp_path, command, gpus):
    out = tmp_path / "dream.mp4"
    flags = ("--device", "cuda", "--dtype", "int8", "--frames", 2, "--output", out)
    outcome = command("generate", "--model", world, *flags)
    assert outcome.code == 0, outcome.err
    assert "int8" in outcome.err + outcome.out
    assert len(read_video(out).frames) >= 2
    assert gpus.num_replays > 0
