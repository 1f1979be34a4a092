"""Workers in this process and in Ray's: `diagd evaluate --workers 2` as a user runs it."""

import importlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from diagd.evaluation.results import read_results
from diagd.workers import Pool, _Actor, check_resources, do_tasks
from tests.evaluation.lines import write_clips


class Halver:
    """Halves even numbers; dies of 13, and refuses to be made for a negative number."""

    made = 0

    def __init__(self, number):
        if number < 0:
            raise FileNotFoundError(f"no {number}")
        Halver.made += 1

    def __call__(self, task):
        if task == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if task % 2:
            raise ValueError(f"{task} is odd")
        return torch.full((task // 2,), task // 2)


def told(done):
    return [(task, str(r) if isinstance(r, ValueError) else r.tolist()) for task, r in done]


HALVED = [(2, [1]), (3, "3 is odd"), (4, [2, 2])]


def test_one_process_does_all_tasks_with_one_worker_and_goes_on_after_a_mistake():
    before = Halver.made
    assert told(do_tasks([2, 3, 4], partial(Halver, 0), Pool())) == HALVED
    assert Halver.made == before + 1


def test_an_actor_makes_its_worker_once_and_hands_mistakes_back_as_words():
    before = Halver.made
    actor = _Actor(partial(Halver, 0), 1, Path.cwd())
    done = [actor.do(*job) for job in enumerate((2, 3, 4))]
    assert [number for number, _ in done] == [0, 1, 2]
    assert told(zip((2, 3, 4), (result for _, result in done), strict=True)) == HALVED
    assert Halver.made == before + 1


def test_a_worker_that_cannot_be_made_ends_it_all():
    with pytest.raises(FileNotFoundError, match="no -1"):
        next(do_tasks([2], partial(Halver, -1), Pool()))
    number, why = _Actor(partial(Halver, -1), 1, Path("no such folder")).do(0, 2)
    assert (number, str(why)) == (None, "no -1")


def test_without_tasks_no_worker_is_made():
    assert list(do_tasks([], partial(Halver, -1), Pool(workers=3))) == []


@pytest.mark.slow
def test_processes_of_ray_s_do_what_one_process_does():
    pool = Pool(workers=2, worker_cpus=0.5)
    done = sorted(told(do_tasks([2, 13, 3, 4], partial(Halver, 0), pool)))
    assert done == [*HALVED, (13, "worker process crashed 4 times on this task")]
    with pytest.raises(ValueError, match="no -1"):
        list(do_tasks([2, 3], partial(Halver, -1), pool))


STRANGER = """
import logging, sys, ray
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "ran").remote()))
"""


@pytest.mark.slow
def test_who_does_not_know_the_token_runs_no_code_in_workers():
    tasks = do_tasks([2, 4], partial(Halver, 0), Pool(workers=2, worker_cpus=0.5))
    next(tasks)
    ray = importlib.import_module("ray")
    command = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    ours = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}

    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    others = {"RAY_AUTH_MODE": "disabled"}, ours | {"RAY_AUTH_TOKEN": 64 * "0"}
    visits = [
        subprocess.Popen(command, env=known | env, text=True, stdout=PIPE, stderr=PIPE)
        for env in (*others, ours)
    ]
    said = [visit.communicate(timeout=200)[0] for visit in visits]
    assert said == ["", "", "ran\n"]
    assert [visit.returncode for visit in visits] == [1, 1, 0]
    assert len(list(tasks)) == 1


@pytest.mark.parametrize(
    ("count", "shares", "message"),
    [
        (3, {"CPU": 1.5}, "3 workers of 1.5 CPUs each need more than the 4 available"),
        (1, {"CPU": 1, "GPU": 1}, "1 workers of 1 GPUs each need more than the 0 available"),
    ],
)
def test_more_than_there_is_is_refused(count, shares, message):
    with pytest.raises(ValueError, match=message):
        check_resources(count, shares, {"CPU": 4.0})
    check_resources(4, {"CPU": 1, "GPU": 0}, {"CPU": 4.0})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"worker_cpus": -1}, "worker_cpus must be at least 0, got -1"),
        ({"worker_gpus": -1}, "worker_gpus must be at least 0, got -1"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Pool(**numbers)


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for pool in (Pool(workers=2), Pool(address="auto")):
        with pytest.raises(ValueError, match=r"--workers needs ray: pip install -e '\.\[scale\]'"):
            next(do_tasks([2, 4], partial(Halver, 0), pool))


def start(world, clips, out, *flags):
    command = [sys.executable, "-m", "diagd", "evaluate", "--clips", clips, "--out", out]
    options = "--model", world, "--frames", 5, "--context-frames", 2, "--backend", "eager"
    arguments = [str(word) for word in (*command, *options, *flags)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(folder):
    clips = read_results(folder / "results.jsonl").clips
    return {(r["strategy"], r["clip"]): (r["quality"], r["features"], r["seed"]) for r in clips}


@pytest.mark.slow
def test_workers_measure_what_one_process_measures_even_if_one_is_killed(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=24)
    flags = "--num-clips", 24, "--strategy", "k=2 k=1"
    # of one thread, as each worker has: more end the sums of metrics in other digits
    alone = start(world, clips, tmp_path / "alone", *flags, "--threads", 1)
    assert alone.communicate(timeout=300)[1] == ""
    workers = ("--workers", 2, "--worker-cpus", 0.5, "--save-videos")
    together = start(world, clips, tmp_path / "out", *flags, *workers)
    victim = killed_after_its_first_line(tmp_path / "out" / "results.jsonl", together)
    _, err = together.communicate(timeout=300)
    assert together.returncode == 0, err
    results = read_results(tmp_path / "out" / "results.jsonl")
    assert len(results.clips) == 24 * 6
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "alone")
    pids = {record["worker"] for record in results.clips}
    assert victim in pids
    assert len(pids) >= 2
    assert together.pid not in pids
    videos = {tmp_path / "out" / record["video"] for record in results.clips}
    assert set((tmp_path / "out").rglob("*.mp4")) == videos


def killed_after_its_first_line(path, process):
    """Wait for a line, then kill the worker that measured it; returns its process id."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if path.is_file() and (clips := read_results(path).clips):
            os.kill(clips[0]["worker"], signal.SIGKILL)
            return clips[0]["worker"]
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])
