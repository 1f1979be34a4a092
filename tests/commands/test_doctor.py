"""What `diagd doctor` finds on this machine, and what it would say of others."""

import re

import pytest
import torch

from diagd.backends.devices import choose_dtype
from diagd.benchmark.machine import choices, probe_speed
from diagd.commands.doctor import _verdict, _warnings
from diagd.extras import EXTRAS

CPU = torch.device("cpu")
QUIET = {"used_by_others": 0.05, "threads": 2, "cores_allowed": 2.0}
BUILT = {"origin": "prebuilt for avx2", "problem": None}


def test_the_document_holds_what_is_said(command):
    outcome = command("doctor", "--seconds", 0, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    machine, chosen = document["machine"], document["choices"]
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == torch.get_num_threads()
    assert 0 < machine["memory_available_bytes"] < machine["memory_bytes"]
    assert machine["cores_allowed"] > 0
    assert chosen["dtype"]["name"] == choose_dtype("auto", CPU)
    assert chosen["backend"]["name"] in ("native", "eager")
    assert set(document["extras"]) == set(EXTRAS)
    assert (document["frames_per_second"], document["gpu"]) == ({}, None)
    for text in (machine["python"], chosen["backend"]["why"], *document["warnings"]):
        assert text in outcome.err


def test_the_probe_dreams_with_the_bundled_world():
    (speed,) = probe_speed(CPU, torch.float32, 0.1, ("k=1",)).values()
    assert speed > 0


def test_a_missing_compiler_is_a_reason_and_a_warning():
    kernels = {"origin": None, "problem": "no C++ compiler found (set CXX, or install g++)"}
    backend = choices(CPU, kernels)["backend"]
    assert backend["name"] == "eager"
    assert "no C++ compiler found" in backend["why"]
    (warning,) = _warnings(QUIET, kernels)
    assert "no C++ compiler found" in warning


def test_where_the_kernels_come_from_is_the_reason_for_the_backend():
    assert choices(CPU, BUILT)["backend"] == {
        "name": "native",
        "why": "our kernels, prebuilt for avx2",
    }


def test_a_busy_machine_and_too_many_threads_are_warned_of():
    assert _warnings(QUIET, BUILT) == []
    (busy,) = _warnings(QUIET | {"used_by_others": 0.6}, BUILT)
    assert "other programs use 60% of the processor" in busy
    (crowded,) = _warnings(QUIET | {"threads": 8, "cores_allowed": 1.5}, BUILT)
    assert crowded == "8 threads share 1.5 cores: try --threads 1"


@pytest.mark.parametrize(
    ("speed", "words"),
    [(20.0, "in real time"), (4.0, "2.2 times slower"), (0.5, "18 times slower .* videos")],
)
def test_the_speed_is_put_in_words(speed, words):
    assert re.search(words, _verdict(speed))


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_probe_of_no_length_is_refused(seconds, command):
    command("doctor", "--seconds", seconds).assert_refused("seconds must be 0 or more")
