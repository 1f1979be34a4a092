import json
import random

import pytest
import torch

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_video
from diagd.pipeline.scenes import model_scenes
from diagd.training import loop
from diagd.training.charts import plot_loss
from diagd.web.play.server import PlayOptions, load
from tests.worlds import clips_of, write_shard

SIZE_PX = (28, 42)  # no multiples of 8


@pytest.fixture
def flags(tmp_path):
    """Flags of a run of two steps on one tiny shard."""
    tokens = write_shard(tmp_path / "tokens", clips_of())
    return (
        *("--tokens", tokens, "--out", tmp_path / "run", "--model", "mc-ar-tiny"),
        *("--frames", 3, "--steps", 2, "--batch-size", 2, "--warmup-steps", 1),
        *("--precision", "no", "--no-compile"),
    )


def test_the_command_trains_and_reports(flags, command, tmp_path):
    outcome = command("train", *flags, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document == {"steps": 2}
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_the_command_refuses_what_is_no_training_data(flags, command, tmp_path):
    (tmp_path / "empty").mkdir()
    outcome = command("train", *flags, "--tokens", tmp_path / "empty")
    outcome.assert_refused(r"no token shards \(shard_\*\.safetensors\) in .*empty")
    shard = tmp_path / "tokens" / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-20])
    command("train", *flags).assert_refused(r"shard_00000\.safetensors: not a token shard")
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_an_output_that_is_a_file(flags, command, tmp_path):
    (tmp_path / "run").write_text("")
    command("train", *flags).assert_refused(r"run")


def write_game(folder, num_clips):
    """Write clips, of lengths of their own, of a bar that goes left and right as it is told."""
    folder.mkdir()
    for number in range(num_clips):
        chance, place, frames, actions = random.Random(number), 14, [], ["none"]
        for _ in range(12 + number):
            frame = torch.full((*SIZE_PX, 3), 70, dtype=torch.uint8)
            frame[8:, place : place + 7] = torch.tensor([200, 60, 40], dtype=torch.uint8)
            frames.append(frame)
            actions.append(chance.choice(("left", "right")))
            place = max(0, min(SIZE_PX[1] - 7, place + {"left": -7, "right": 7}[actions[-1]]))
        path = folder / f"game {number}.mp4"
        write_video(path, torch.stack(frames), fps=5)
        write_actions(path.with_suffix(".jsonl"), actions[:-1])


def test_from_clips_of_a_game_to_a_world_to_play(command, tmp_path, monkeypatch):
    """The whole road, by the commands that each command names as the next one."""
    monkeypatch.setattr(loop, "plot_loss", plot_loss)
    clips, tokens, out = (tmp_path / name for name in ("clips", "my tokens", "my world"))
    write_game(clips, num_clips=6)
    made = command("tokenize", "--clips", clips, "--out", tokens, "--steps", 2, "--codes", 24)
    assert made.code == 0, made
    told = " ".join(made.said.split())
    assert "5 training clips, 1 held out, in pieces of 12 frames; actions: none, " in told
    assert "frames of 28x42 px are 4x6 tokens of 7x7 px" in told
    assert f"next: diagd train --tokens '{tokens}' --out world" in told

    trained = command(
        "train", "--tokens", tokens, "--out", out, "--minutes", 0.05, "--batch-size", 4, "--json"
    )
    assert trained.code == 0, trained
    assert trained.document["validation_loss"] > 0
    told = " ".join(trained.said.split())
    assert "mc-ar-128x3" in told
    assert f"next: diagd play --model '{out}'" in told
    assert f"diagd tune --model '{out}' --tokens '{tokens}' finds" in told
    for picture in ("loss.png", "dreams.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    last = sorted((out / "dreams").glob("step_*.png"))[-1]
    assert int(last.stem.removeprefix("step_")) == trained.document["steps"]

    world = diagd.VideoGenerator.from_pretrained(out)
    assert world.frame_size_px == SIZE_PX
    assert world.vocabulary is not None
    assert world.vocabulary.names == ("none", "left", "right")
    prompt = read_video(out / "prompt.mp4").frames
    video = world.generate(
        prompt, ["left", "right"], num_frames=2, context_actions=["left"] * (len(prompt) - 1)
    )
    assert video.frames.shape == (2, *SIZE_PX, 3)
    assert world.defaults.fps == 5
    scenes = model_scenes(out, world, context_frames=4)
    assert len(scenes) == 1 + 5  # the prompt and the others
    dream = command("generate", "--model", out, "--frames", 3, "--output", tmp_path / "dream.mp4")
    assert dream.code == 0, dream

    flags = ("--tokens", tokens, "--model", out, "--frames", 4, "--strategy", "k=2", "zipar=2")
    tuned = command("tune", *flags, "--tolerance", 99, "--json")
    choice = tuned.document["choice"]["name"]
    assert f"next: diagd play --model '{out}' --strategy {choice}" in " ".join(tuned.said.split())
    kept = command("tune", *flags, "--tolerance", 99, "--make-default")
    assert kept.code == 0, kept
    assert json.loads((out / "generation.json").read_text())["decoding"] == choice
    scheduler, _ = load(PlayOptions(model=str(out)))
    assert str(scheduler.controls and scheduler.controls.strategy) == choice
    assert choice in command("generate", "--model", out, "--output", tmp_path / "two.mp4").out
