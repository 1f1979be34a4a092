import json

import pytest
import torch

from diagd.backends import prepare as backends
from diagd.backends.linears import MergedLinear
from diagd.backends.native.model import NativeModel
from diagd.backends.prepare import prepare
from diagd.backends.replay import Compiled
from diagd.models.transformer import Transformer
from tests.models.tiny import tiny_model


def test_on_the_cpu_our_kernels_run_by_default():
    for dtype, weights in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        model, backend = prepare(tiny_model().to(dtype))
        assert isinstance(model, NativeModel)
        assert (model.weights, backend) == (weights, "native")
    model = prepare(tiny_model(), int8=True)[0]
    assert isinstance(model, NativeModel)
    assert model.weights == "int8"


@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_other_backends_run_a_merged_pytorch_model(backend):
    model, named = prepare(tiny_model(), backend)
    model = model.model if isinstance(model, Compiled) else model
    assert isinstance(model, Transformer)
    assert named == backend
    packed = [m.packed is not None for m in model.modules() if isinstance(m, MergedLinear)]
    assert packed
    assert set(packed) == {backend == "eager"}  # torch.compile packs by itself


def test_half_precision_has_no_kernels_and_runs_eagerly():
    model, backend = prepare(tiny_model().half())
    assert isinstance(model, Transformer)
    assert backend == "eager"


def test_what_our_kernels_do_not_have_runs_eagerly():
    model = tiny_model(position="rope3d", position_table=True, max_positions=32, prefix_length=1)
    assert prepare(model)[1] == "eager"


@pytest.mark.parametrize("torn", [b"", b'[["native", "flo', b"\0\xff"])
def test_times_whose_file_is_damaged_are_taken_again(torn, tmp_path, monkeypatch):
    config = tiny_model().config
    monkeypatch.setattr(backends, "cache_folder", lambda: tmp_path)
    path = tmp_path / f"steps-{backends._digest_of(backends.shape_to_time(config))}.json"
    path.write_bytes(torn)
    monkeypatch.setattr(backends, "time_steps", lambda _, models: dict.fromkeys(models, (1.0, 2.0)))
    found = backends.time_candidates.__wrapped__(config)
    assert {one.backend for one in found} >= {"eager"}
    assert json.loads(path.read_bytes()) == [[one.backend, one.dtype, [1.0, 2.0]] for one in found]


def test_without_a_compiler_pytorch_runs_and_says_so(monkeypatch, caplog):
    def fail(*arguments, **settings):
        raise OSError("no C++ compiler found (set CXX, or install g++)")

    monkeypatch.setattr(backends, "NativeModel", fail)
    model, backend = prepare(tiny_model())
    assert isinstance(model, Transformer)
    assert backend == "eager"
    assert "no C++ compiler found" in caplog.text
    message = r"backend native: no C\+\+ compiler found"
    with pytest.raises(ValueError, match=message):
        prepare(tiny_model(), "native")
    with pytest.raises(ValueError, match=message):
        prepare(tiny_model(), int8=True)


@pytest.mark.parametrize(
    ("backend", "int8", "message"),
    [
        (
            "fast",
            False,
            "backend must be one of auto, native, eager, compile, cuda-graph, triton, "
            "compiled-graph, webgpu, got",
        ),
        ("cuda-graph", False, "backend cuda-graph needs --device cuda"),
        ("triton", False, "backend triton: it needs --device cuda, got cpu"),
        ("compiled-graph", False, "backend compiled-graph: it needs --device cuda, got cpu"),
        ("eager", True, "int8 needs backend native or webgpu on the cpu, got eager"),
    ],
)
def test_backends_that_cannot_run_are_refused(backend, int8, message):
    with pytest.raises(ValueError, match=message):
        prepare(tiny_model(), backend, int8)
    with pytest.raises(ValueError, match=r"native needs .* got torch.float16 on cpu"):
        prepare(tiny_model().half(), "native")
