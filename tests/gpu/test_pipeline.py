"""Whole worlds on the pretended GPU: commands, evaluate, play's session, the benchmark."""

from typing import Any

import pytest
import torch

import diagd
from diagd.benchmark import steps
from diagd.benchmark.bench import Inputs, engine_rows, report_rows, time_rows
from diagd.benchmark.steps import Ceilings
from diagd.data.video import read_video
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Diagonal, Exact
from diagd.evaluation.evaluate import Task
from diagd.web.play.session import Controls, Session, SessionLog
from tests import oracles
from tests.evaluation.lines import write_clips
from tests.evaluation.test_measure import meter_of
from tests.models.tiny import tiny_model
from tests.worlds import PROMPT_ACTIONS

SAMPLED = diagd.SamplingOptions(1.0, top_p=0.9)


def worlds(path):
    return [
        diagd.VideoGenerator.from_pretrained(path, "cpu", "float32", backend="eager"),
        diagd.VideoGenerator.from_pretrained(path, "cuda", "float32"),
    ]


@pytest.mark.parametrize("strategy", ["k=1", "k=2,d=4", "exact,lanes=8"])
def test_a_world_goes_on_from_a_clip_as_on_the_cpu(strategy, world, gpus):
    videos = []
    for one in worlds(world):
        clip = world / "prompt.mp4"
        actions = "left,right,forward"
        both = one.generate([clip, clip], [actions, actions], strategy=strategy, sampling=SAMPLED)
        frames = one.stream(clip, iter(actions.split(",")), strategy=strategy, sampling=SAMPLED)
        videos.append((torch.stack([v.tokens for v in both]).cpu(), torch.stack(list(frames))))
    for own, other in zip(*videos, strict=True):
        assert torch.equal(own, other)
    assert gpus.num_replays > 0


def test_the_command_says_what_it_wrote_and_that_it_was_a_gpu(world, tmp_path, command, gpus):
    written = []
    for device in ("cpu", "cuda:1"):
        out = tmp_path / f"{device[:4]}.mp4"
        flags = ("--dtype", "float32", "--frames", 3, "--json", "--output", out)
        outcome = command("generate", "--model", world, "--device", device, *flags)
        assert outcome.code == 0, outcome.err
        written.append(read_video(out).frames)
    assert torch.equal(*written)
    assert torch.cuda.current_device() == 0


def test_evaluate_warms_up_what_it_times(world, tmp_path, gpus):
    clips = write_clips(tmp_path / "clips", count=2)
    for strategy in ("k=1", "exact,lanes=8"):
        lines = []
        for device, backend in (("cpu", "eager"), ("cuda", "auto")):
            meter = meter_of(world, clips, device=device, backend=backend)
            for clip in ("clip_0", "clip_1"):
                captured = gpus.num_captures
                lines.append(meter(Task("tiny", strategy, clip))[0])
                if clip == "clip_1" and strategy == "k=1":
                    assert gpus.num_captures == captured
        for own, other in zip(lines[:2], lines[2:], strict=True):
            assert own["tokens"] == other["tokens"]
        if strategy == "k=1":
            assert all(line["stats"]["capture_seconds"] == 0 for line in lines)


def test_a_session_of_play_is_the_same_session(world, gpus):
    frames = read_video(world / "prompt.mp4").frames[-3:]
    start = SessionLog(frames, PROMPT_ACTIONS[-2:], seed=5)
    chosen = [
        Controls(Diagonal(1), 1.0, 0.9),
        Controls(Diagonal(1), 0),
        Controls(Exact(), 1.0, 0.9),
    ]
    histories = []
    for one in worlds(world):
        session = Session(one, start)
        for turn in range(9):  # longer than the context
            session.advance(("left", "forward")[turn % 2], chosen[turn % 3])
        histories.append(session.history)
    assert histories[0] == histories[1]


def test_inside_hugging_face_generate(gpus):
    """With guidance, where a step runs pairs of rows."""
    grid, written = TokenGrid(2, 3, 5), []
    prompt = torch.randint(18, (2, 4), generator=torch.Generator().manual_seed(0))
    for device in ("cpu", "cuda"):
        llama: Any = oracles.tiny_llama(24, 160)
        llama.to(device)
        for scale in (None, 1.5):
            schedule = diagd.DiagonalSchedule(grid, 1, 4)
            written.append(
                llama.generate(
                    prompt.to(device),
                    custom_generate=diagd.custom_generate(schedule, context_frames=0),
                    max_new_tokens=grid.num_tokens,
                    do_sample=False,
                    guidance_scale=scale,
                ).cpu()
            )
    assert torch.equal(written[0], written[2])
    assert torch.equal(written[1], written[3])


@pytest.mark.parametrize(("sample", "name"), [(None, "cuda:1"), (4, "cuda")])
def test_the_benchmark_waits_once_a_run_not_once_a_step(sample, name, gpus):
    model = tiny_model(max_positions=320)
    grid, device = TokenGrid(2, 3, 5), torch.device(name)
    prompt = torch.zeros(1, 15, dtype=torch.int64, device=device)
    inputs = Inputs(prompt, 1, torch.zeros(1, 2, 2, dtype=torch.int64, device=device) + 45)
    strategies = [diagd.Raster(), diagd.Diagonal(1)]
    options = diagd.SamplingOptions()
    rows = engine_rows(
        model.to(device), "float32", "auto", strategies, grid, [inputs], options, sample
    )
    time_rows(rows, 1)
    assert rows[0].runs[0].capture_seconds > 0
    before, replays = gpus.waits.total(), gpus.num_replays
    time_rows(rows[:1], 1)  # two runs
    steps = gpus.num_replays - replays
    # four frames, which are one launch each, or some steps of them
    assert steps == 4 if sample is None else 8 <= steps < 20
    assert gpus.waits.total() - before < 30
    assert gpus.timed == {torch.cuda.current_stream(device)}
    limits = {"float32": Ceilings(1e9, 1e9)}
    first, second = report_rows(rows, model.config, grid, limits)
    assert (first["steps"], first["fed_per_token"]) == (30, (30 + 1 + 3) / 30)
    assert second["step_ms"]["min"] >= 0
    assert {first["attention"], second["attention"]} <= {"flash_attention", "math"}


def test_what_a_gpu_moves_at_best_is_a_copy_counted_both_ways(gpus, monkeypatch):
    monkeypatch.setattr(steps, "_STREAM_NUMBERS", 6)
    monkeypatch.setitem(steps._MATRIX_SIZE, "cuda", 4)
    monkeypatch.setattr(steps, "_fastest", lambda run, _: run() is None or 0.5)
    found = steps.measure_ceilings.__wrapped__(torch.device("cuda:1"), torch.float32)
    assert found == Ceilings(2 * 6 * 4 / 0.5, 2 * 4**3 / 0.5)


def test_the_doctor_says_what_the_gpu_is(command, gpus):
    outcome = command("doctor", "--device", "cuda", "--seconds", 0, "--json")
    gpu = outcome.document["gpu"]
    assert (gpu["name"], gpu["capability"]) == ("a pretended GPU", "9.0")
    assert (
        "backend    cuda-graph" in outcome.err or "starts before the last has ended" in outcome.err
    )
    assert "gpu        a pretended GPU, 16.0 GiB, 8.0 GiB free; capability 9.0" in outcome.err
