"""From a LeRobot dataset to a world that vectors steer, by the commands."""

from typing import Any

import gymnasium
import numpy as np
import pytest

import diagd
from diagd.data.vectors import VectorActions
from diagd.files import read_json_object
from diagd.tokenizers.shards import read_shards
from diagd.training.corpus import tokenize
from diagd.training.options import TokenizeOptions, TrainOptions
from diagd.training.sequences import draw_batch
from diagd.training.train import pretrain
from diagd.web.play.welcome import keyboard_of
from runs import robot_steering
from tests.data.robots import write_robot
from tests.web.play.serving import serving

AXES = ("shoulder.pos", "elbow.pos", "grip")
QUICK = ("--steps", 1, "--batch-size", 2, "--codes", 16, "--frame-stride", 1, "--bins", 5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robot") / "set"
    write_robot(folder, "v2.1", lengths=(6, 6, 6))
    return folder


def test_a_dataset_becomes_a_world_that_vectors_steer(dataset, command, tmp_path):
    tokens, out = tmp_path / "tokens", tmp_path / "world"
    flags = "--lerobot", dataset, "--camera", "top", "--out", tokens, *QUICK
    made = command("tokenize", *flags)
    assert made.code == 0, made
    assert "actions: none, shoulder.pos=min, shoulder.pos=max" in " ".join(made.said.split())
    assert command("tokenize", *flags).code == 0  # nothing is left to do
    clips = read_shards(tokens / "train")
    codec = clips.codec
    assert isinstance(codec, VectorActions)
    assert (codec.axes, clips.actions.shape) == (AXES, (2, 6, 3))
    assert clips.actions[1, 1:].tolist() == [
        list(codec.tokens_of(f"move({10 + t},{-10 - t},0)")) for t in range(5)
    ]
    frames = draw_batch(clips, 3, 2, 0)[:, clips.tokens[0, 0].numel() :]
    assert (frames[:, :3] - clips.codebook_size).ge(0).all()  # three tokens before a frame
    checked = command("check", tokens / "clips", "--json")
    assert "shoulder.pos=max" in checked.document["actions"]

    trained = command(
        *("train", "--tokens", tokens, "--out", out, "--model", "mc-ar-tiny", "--steps", 2),
        *("--frames", 3, "--batch-size", 2, "--no-compile", "--hold", 0.3),
    )
    assert trained.code == 0, trained
    tuned = command(
        *("finetune", "--init", out, "--tokens", tokens, "--out", tmp_path / "tuned"),
        *("--frames", 3, "--steps", 2, "--batch-size", 2, "--no-compile"),
    )
    assert tuned.code == 0, tuned
    dream = ("generate", "--model", out, "--output", tmp_path / "dream.mp4", "--actions")
    told = command(*dream, "move(20,-20,0)*2,grip=max+elbow.pos=-3")
    assert told.code == 0, told
    refused = command(*dream, "move(1,2)")
    refused.assert_refused(r"unknown action 'move\(1,2\)', expected none or move\(shoulder")

    world = diagd.VideoGenerator.from_pretrained(out)
    assert world.vocabulary == codec
    keyboard = keyboard_of(codec)
    assert (keyboard.combines, keyboard.keys["elbow.pos=min"]) == (True, ("Digit3",))
    rows = np.array([[1.0, -2, 0], [20, -20, 0]])
    named = world.generate(tmp_path / "dream.mp4", ["move(1,-2,0)", "move(20,-20,0)"])
    assert world.generate(tmp_path / "dream.mp4", rows).frames.equal(named.frames)


@pytest.fixture
def robot_world(dataset, tmp_path):
    """Train a world of the wrist's camera for a step."""
    options = {"steps": 1, "batch_size": 2, "codes": 16, "frame_stride": 1, "camera": "wrist"}
    tokenize(TokenizeOptions(lerobot=dataset, out=tmp_path / "tokens", **options))
    plain = {"frames": 3, "steps": 1, "batch_size": 2, "compile": False, "model": "mc-ar-tiny"}
    pretrain(TrainOptions(tokens=tmp_path / "tokens", out=tmp_path / "world", **plain))
    return tmp_path / "world"


def test_an_agent_acts_by_vectors_here_and_elsewhere(robot_world):
    here = diagd.GymEnv(robot_world, strategy="k=1", dtype="float32")
    assert here.action_space == gymnasium.spaces.Box(
        np.array([0.0, -24, 0]), np.array([24.0, 0, 0]), dtype=np.float64
    )
    with serving(robot_world, dtype="float32") as served:
        there = diagd.GymEnv(url=served.url, strategy="k=1")
        assert there.action_space == here.action_space
        assert np.array_equal(here.reset(seed=1)[0], there.reset(seed=1)[0])
        action = np.array([7.0, -3.0, 0.0])
        mine, theirs = here.step(action), there.step(action)
        assert mine[4]["action"] == "move(7,-3,0)"
        assert np.array_equal(mine[0], theirs[0])
        played: Any = there.episodes._played
        with pytest.raises(ValueError, match="a vector has 3 numbers, got 2"):
            played.sessions[0].step([1.0, 2.0])
        there.close()
    with pytest.raises(ValueError, match="action must be in Box"):
        here.step(np.array([99.0, 0, 0]))


def test_a_world_is_steered_if_true_actions_come_closer_than_opposite_ones(robot_world, tmp_path):
    out, picture = tmp_path / "steering.json", tmp_path / "steering.png"
    clips = tmp_path / "tokens" / "clips"
    given = robot_steering.Options(robot_world, clips, out, picture, start=3, frames=3)
    robot_steering.main(given)
    found = read_json_object(out)
    ways = [f"{one}, {way}" for one in ("raster", "k=1") for way in ("true", "opposite")]
    assert list(found["ways"]) == ["tokenizer", "last frame", *ways]
    assert found["episodes"] == 1  # of three, one is held out
    for one in found["ways"].values():
        assert one["psnr"] == pytest.approx(np.mean(one["by_frame"]))
    for one in ("raster", "k=1"):
        true, opposite = (found["ways"][f"{one}, {way}"]["psnr"] for way in ("true", "opposite"))
        assert found["true_above_opposite"][one] == float(true > opposite)
    assert picture.is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "camera must be given: expected one of: observation.images.top, observation"),
        (("--camera", "side"), "no camera side, expected one of: observation.images.top"),
        (("--camera", "top", "--vectors", "qpos"), "no vectors named qpos, expected one of: act"),
        (("--camera", "top", "--every", 9), "episodes must have more than 9 frames"),
        (("--camera", "top", "--bins", 99999), r"bins must be in \[2, 10922\] for 3 axes"),
        (("--camera", "top", "--heldout", "clips"), "heldout must be left out with lerobot"),
        (("--camera", "top", "--size", "26x40"), "use a size such as --size 24x40"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_written(
    flags, message, dataset, command, tmp_path
):
    out = tmp_path / "out"
    command("tokenize", "--lerobot", dataset, "--out", out, *flags).assert_refused(message)
    assert not out.exists()


def test_flags_of_datasets_are_not_for_clips(dataset, command, tmp_path):
    out = "--out", tmp_path / "out"
    refused = command("tokenize", "--clips", dataset, "--camera", "top", *out)
    refused.assert_refused("--camera is only for --lerobot")
    for both in ((), ("--clips", dataset, "--lerobot", dataset)):
        command("tokenize", *both, *out).assert_refused("give either --clips or --lerobot")
