import json
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.recorders.doom import (
    ACTIONS,
    BUTTONS,
    NEAR_DEPTH,
    PRESSED,
    Explorer,
    open_doom,
)
from diagd.data.recorders.recording import RecordOptions, clip_paths, record_clips
from diagd.data.video import read_video

FRAMES, HEIGHT_PX, WIDTH_PX = 6, 32, 48


def record(folder, **changes):
    given = {"out": folder, "clips": 2, "frames": FRAMES, "first_seed": 70}
    given["size"] = f"{HEIGHT_PX}x{WIDTH_PX}"
    return record_clips(RecordOptions(**{**given, **changes}), open_doom)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Record two short clips of the real game."""
    pytest.importorskip("vizdoom", reason="recording needs pip install 'diagd[doom]'")
    folder = tmp_path_factory.mktemp("gameplay")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        assert record(folder) == {"recorded": 2, "clips": 2}
    return folder


def test_a_recording_is_clips_with_an_action_for_every_frame(recording):
    names = sorted(path.name for path in recording.iterdir())
    assert names == [
        "actions.json",
        *("clip_000070.jsonl", "clip_000070.mp4"),
        *("clip_000071.jsonl", "clip_000071.mp4"),
    ]
    for seed in (70, 71):
        video_path, actions_path = clip_paths(recording, seed)
        video = read_video(video_path)
        assert video.frames.shape == (FRAMES, HEIGHT_PX, WIDTH_PX, 3)
        assert video.fps == Fraction(35, 4)
        assert video.frames.float().std() > 10  # not a black screen
        assert len(read_actions(actions_path, ACTIONS, FRAMES)) == FRAMES
        assert ActionVocabulary.load(recording / "actions.json") == ACTIONS
        assert json.loads(actions_path.read_text().splitlines()[0]) == {"action": "none"}


def test_two_clips_are_two_episodes(recording):
    first, second = (read_video(clip_paths(recording, seed)[0]).frames for seed in (70, 71))
    assert not torch.equal(first[0], second[0])


def test_the_same_seed_records_the_same_clip_and_what_is_there_is_kept(
    recording, tmp_path, monkeypatch
):
    """A second machine starts at clip 71, was killed after its actions, and has clip 72 already."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gameplay"
    folder.mkdir()
    clip_paths(folder, 71)[1].write_text("half")
    for path in clip_paths(folder, 72):
        path.write_text("kept")
    assert record(folder, first_seed=71) == {
        "recorded": 1,
        "clips": 2,
    }
    for ours, theirs in zip(clip_paths(folder, 71), clip_paths(recording, 71), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert [path.read_text() for path in clip_paths(folder, 72)] == ["kept", "kept"]
    assert record(folder, first_seed=71) == {
        "recorded": 0,
        "clips": 2,
    }


def test_action_names_press_their_buttons():
    left, right, forward = range(3)
    assert BUTTONS == ("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD")
    for name, pressed in PRESSED.items():
        words = set(name.split("+")) - {"none"}
        assert pressed[left] == ("left" in words)
        assert pressed[right] == ("right" in words)
        assert pressed[forward] == ("forward" in words)


def test_recording_leaves_nothing_where_it_was_started(tmp_path, monkeypatch):
    pytest.importorskip("vizdoom", reason="recording needs pip install 'diagd[doom]'")
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "gameplay", clips=1, frames=2)
    assert [path.name for path in tmp_path.iterdir()] == ["gameplay"]


def test_an_unknown_scenario_lists_the_known_ones(command, tmp_path):
    pytest.importorskip("vizdoom", reason="recording needs pip install 'diagd[doom]'")
    outcome = command("record", "--out", tmp_path / "out", "--scenario", "e1m1")
    outcome.assert_refused(r"unknown scenario 'e1m1', expected one of: .*my_way_home")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_recorded(recording, command):
    size = ("--size", f"{HEIGHT_PX}x{WIDTH_PX}", "--frames", FRAMES)
    outcome = command(
        "record", "--out", recording, "--clips", 2, "--first-seed", 70, *size, "--json"
    )
    assert (outcome.code, outcome.document) == (0, {"recorded": 0, "clips": 2})


def test_an_output_that_is_a_file_is_refused(command, tmp_path):
    pytest.importorskip("vizdoom", reason="recording needs pip install 'diagd[doom]'")
    (tmp_path / "out").write_text("")
    command("record", "--out", tmp_path / "out", "--clips", 1).assert_refused("out")


def test_without_vizdoom_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ValueError, match=r"needs vizdoom: pip install 'diagd\[doom\]'"):
        record(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def depths(left, ahead, right):
    """A depth buffer of three bands, near floor and ceiling as in a corridor."""
    depth = np.zeros((60, 90), dtype=np.uint8)
    for band, value in enumerate((left, ahead, right)):
        depth[22:38, 30 * band : 30 * (band + 1)] = value
    return depth


def test_the_explorer_is_a_function_of_its_seed():
    walks = []
    for seed in (3, 3, 4):
        noise = np.random.default_rng(0)
        explorer = Explorer(seed)
        random.seed(len(walks))  # what others draw does not matter
        walks.append([explorer.choose(depths(*noise.integers(0, 60, 3))) for _ in range(60)])
    assert walks[0] == walks[1] != walks[2]
    assert set(walks[0]) <= set(PRESSED)


@pytest.mark.parametrize(
    ("left", "right", "action"), [(40, 5, "left"), (5, 40, "right")], ids=["left", "right"]
)
def test_the_explorer_turns_away_from_a_wall_to_the_open_side(left, right, action):
    for seed in range(10):
        explorer = Explorer(seed)
        turns = [explorer.choose(depths(left, NEAR_DEPTH - 1, right)) for _ in range(2)]
        assert turns == [action, action]


def test_the_explorer_does_every_action_where_there_is_room():
    explorer = Explorer(0)
    done = [explorer.choose(depths(60, 60, 60)) for _ in range(600)]
    assert set(done) == set(ACTIONS.names)
    assert done.count("forward") > done.count("none")
