"""Ray in processes of its own: `diagd evaluate --workers 2` as a user runs it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from diagd.evaluation.measure import Task
from diagd.evaluation.ray_workers import Pool, _Actor, _check_resources, measure_on_workers
from diagd.evaluation.results import read_results
from tests.evaluation.lines import write_clips
from tests.evaluation.test_measure import settings_of


def start(world, clips, out, *flags):
    command = [sys.executable, "-m", "diagd", "evaluate", "--clips", clips, "--out", out]
    options = "--model", world, "--frames", 5, "--context-frames", 2, "--backend", "eager"
    arguments = [str(word) for word in (*command, *options, *flags)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(folder):
    clips = read_results(folder / "results.jsonl").clips
    return {(r["method"], r["clip"]): (r["quality"], r["features"], r["seed"]) for r in clips}


@pytest.mark.slow
def test_workers_measure_what_one_process_measures_even_if_one_is_killed(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=24)
    flags = "--num-clips", 24, "--schedules", "k=2 k=1"
    alone = start(world, clips, tmp_path / "alone", *flags)
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


def test_a_worker_hands_a_user_s_mistake_back_as_words(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=1)
    actor = _Actor(settings_of(world, clips, num_frames=9), 1, with_frames=True)
    row = actor(Task("tiny", "k=1", "clip_0")._asdict())
    assert "expected at least 9 frames from frame 1 on" in row["error"]
    assert row["pixels"] == b""


def test_a_worker_s_row_is_the_line_and_the_pixels(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=1)
    settings = settings_of(world, clips)
    rows = [
        _Actor(settings, 1, with_frames)(Task("tiny", "copy", "clip_0")._asdict())
        for with_frames in (True, False)
    ]
    assert rows[0]["shape"] == [3, 24, 40, 3]
    assert len(rows[0]["pixels"]) == 3 * 24 * 40 * 3
    assert (rows[1]["shape"], rows[1]["pixels"]) == ([0, 24, 40, 3], b"")
    assert not rows[0]["error"]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Pool(3, 1.5, 0, None), "3 workers of 1.5 CPUs each need more than the 4 there are"),
        (Pool(1, 1, 1, None), "1 workers of 1 GPUs each need more than the 0 there are"),
    ],
)
def test_more_than_there_is_is_refused(pool, message):
    with pytest.raises(ValueError, match=message):
        _check_resources(pool, {"CPU": 4.0})
    _check_resources(Pool(4, 1, 0, None), {"CPU": 4.0})


def test_ray_that_is_missing_is_named(world, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    outcomes = measure_on_workers(settings_of(world, tmp_path), [], Pool(1, 1, 0, None), False)
    with pytest.raises(ValueError, match=r"--workers needs ray: pip install 'diagd\[scale\]'"):
        next(outcomes)


def test_one_process_needs_no_ray():
    script = "import sys, diagd.commands.evaluate; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
