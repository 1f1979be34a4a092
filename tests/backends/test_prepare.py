import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from diagd.backends import prepare as backends
from diagd.backends.linears import MergedLinear
from diagd.backends.native.model import NativeModel
from diagd.backends.prepare import prepare
from diagd.backends.replay import Compiled
from diagd.backends.step_times import StepTimes
from diagd.models.transformer import Transformer
from tests.backends.candidates import candidates_of
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


@pytest.fixture
def timing(tmp_path, monkeypatch):
    """Let steps take no time to be timed, beside others; return how many were timed so far."""
    timing = SimpleNamespace(
        config=tiny_model().config, count=0, used_by_others=0.0, folder=tmp_path
    )
    timing.share = lambda: timing.used_by_others

    def time_steps(shape, models):
        timing.count += 1
        return {name: StepTimes(timing.count, 2.0) for name in models}

    monkeypatch.setattr(backends, "BUSY_SHARE", 0.3)
    monkeypatch.setattr(backends, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(backends, "time_steps", time_steps)
    monkeypatch.setattr(backends, "Neighbours", lambda: timing)
    timing.take = partial(backends.time_candidates.__wrapped__, timing.config)
    backends.time_candidates.cache_clear()
    yield timing
    backends.time_candidates.cache_clear()


def kept_file(timing):
    (path,) = timing.folder.glob("steps-*.json")
    return path


@pytest.mark.parametrize("torn", [b"", b'[["native", "flo', b"\0\xff"])
def test_times_whose_file_is_damaged_are_taken_again(torn, timing):
    timing.take()
    kept_file(timing).write_bytes(torn)
    found = timing.take()
    assert {one.backend for one in found} >= {"eager"}
    kept = json.loads(kept_file(timing).read_bytes())
    assert kept == [[one.backend, one.dtype, list(one.times)] for one in found]


def test_times_are_kept_for_a_day(timing):
    found = timing.take()
    assert (timing.take(), timing.count) == (found, 2)  # of two backends
    yesterday = time.time() - backends.KEPT_S
    os.utime(kept_file(timing), (yesterday, yesterday))
    assert timing.take() != found
    assert timing.count == 4
    backends.time_again(timing.config)
    timing.take()
    assert timing.count == 6


def test_times_taken_on_a_busy_machine_are_not_kept(timing):
    timing.used_by_others = 0.31
    timing.take()
    assert not list(timing.folder.glob("steps-*"))
    timing.used_by_others = 0.29
    quiet = timing.take()
    backends.time_again(timing.config)
    timing.used_by_others = 0.31
    assert timing.take() == quiet  # old ones are better than those of now
    timing.used_by_others = 0.0
    assert timing.take() != quiet


def test_of_several_that_come_at_once_one_takes_the_times(timing):
    with ThreadPoolExecutor(4) as pool:
        found = [job.result() for job in [pool.submit(timing.take) for _ in range(4)]]
    assert found == 4 * found[:1]
    assert timing.count == 2


def test_times_are_taken_where_nothing_can_be_kept(timing, monkeypatch):
    (timing.folder / "file").touch()
    monkeypatch.setattr(backends, "cache_folder", lambda: timing.folder / "file")
    assert timing.take()


@pytest.mark.parametrize(
    ("costs", "dtype", "backend"),
    [
        ((1.0, 2.0, 2.0, 3.0, 1.0), "float32", "native"),
        ((1.0, 2.0, 2.0, 3.0, 1.0), "bfloat16", "eager"),
        ((1.0, 2.0, 2.0, 3.0, 1.0), "int8", "native"),
        ((1.0, 2.0, 2.0, 3.0, 1.0), "float16", "auto"),
    ],
)
def test_a_backend_is_chosen_for_all_who_share_a_run(costs, dtype, backend, monkeypatch):
    monkeypatch.setattr(backends, "time_candidates", lambda _: candidates_of(*costs))
    config, cpu = tiny_model().config, torch.device("cpu")
    assert backends.choose_backend("auto", cpu, dtype, config) == backend
    assert backends.choose_backend("compile", cpu, dtype, config) == "compile"
    assert backends.choose_backend("auto", torch.device("cuda"), dtype, config) == "auto"


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
        ("triton", False, "backend triton: device must be cuda, got cpu"),
        ("compiled-graph", False, "backend compiled-graph: device must be cuda, got cpu"),
        ("eager", True, "int8 needs backend native or webgpu on the cpu, got eager"),
    ],
)
def test_backends_that_cannot_run_are_refused(backend, int8, message):
    with pytest.raises(ValueError, match=message):
        prepare(tiny_model(), backend, int8)
    with pytest.raises(ValueError, match=r"native needs .* got torch.float16 on cpu"):
        prepare(tiny_model().half(), "native")
