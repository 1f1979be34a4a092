import json
import sys
from fractions import Fraction

import pytest
import torch

from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.recorders.doom import (
    ACTIONS,
    BUTTONS,
    PLAYERS,
    SCENARIOS,
    WALKING,
    open_doom,
    view_of,
)
from diagd.data.recorders.recording import RecordOptions, clip_paths, record
from diagd.data.video import read_video

FRAMES, HEIGHT_PX, WIDTH_PX = 6, 32, 48


def record_clips(folder, **changes):
    given = {"out": folder, "clips": 2, "frames": FRAMES, "first_seed": 70}
    given["size"] = f"{HEIGHT_PX}x{WIDTH_PX}"
    return record(RecordOptions(**{**given, **changes}))


@pytest.fixture(scope="module")
def vizdoom():
    return pytest.importorskip("vizdoom", reason="recording needs pip install -e '.[doom]'")


@pytest.fixture(scope="module")
def recording(vizdoom, tmp_path_factory):
    """Record two short clips of the real game."""
    folder = tmp_path_factory.mktemp("gameplay")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        assert record_clips(folder) == {"recorded": 2, "clips": 2, "episodes": 2}
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


def test_action_names_press_their_buttons(tmp_path, vizdoom):
    with open_doom(RecordOptions(tmp_path, scenario="defend_the_line")) as doom:
        doom.start(5)
        assert doom.press("none", 0) is not None
        for name in ACTIONS.names:
            assert doom.press(name, 1) is not None
            pressed = zip(BUTTONS, doom.game.get_last_action(), strict=True)
            assert {word for word, down in pressed if down} == set(name.split("+")) - {"none"}


def test_every_scenario_of_ours_but_the_old_maze_has_the_same_actions():
    """The old maze has the first six of them, so that their ids mean the same."""
    others = {name for name, scenario in SCENARIOS.items() if scenario.actions != ACTIONS}
    assert others == {"my_way_home"}
    assert ACTIONS.names[: WALKING.num_ids] == WALKING.names


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [("maze", 71), ("defend_the_line", 74), ("deathmatch", 72), ("canyon", 75)],
)
def test_a_clip_is_the_same_whatever_was_recorded_before_it(tmp_path, scenario, seed, vizdoom):
    """In one process of the game, a weapon went on bobbing as in the episode before."""
    after, alone = tmp_path / "after", tmp_path / "alone"
    record_clips(after, scenario=scenario, frames=24, first_seed=seed - 1)
    record_clips(alone, scenario=scenario, frames=24, first_seed=seed, clips=1)
    for ours, theirs in zip(clip_paths(after, seed), clip_paths(alone, seed), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert ActionVocabulary.load(after / "actions.json") == ACTIONS


def test_scenarios_with_the_same_actions_share_a_folder_and_the_old_maze_does_not(
    tmp_path, vizdoom
):
    record_clips(tmp_path, scenario="maze", clips=1)
    record_clips(tmp_path, scenario="defend_the_line", clips=1, first_seed=100)
    assert len(list(tmp_path.glob("*.mp4"))) == 2
    with pytest.raises(ValueError, match="holds clips with other actions"):
        record_clips(tmp_path, scenario="my_way_home", clips=1, first_seed=200)


def test_an_episode_that_ends_early_gives_way_to_another_and_is_told(tmp_path, capsys, vizdoom):
    """In the corridor at its own skill one dies soon."""
    told = record_clips(tmp_path, scenario="deadly_corridor", clips=3, frames=24)
    early = told["episodes"] - 3
    assert early > 0
    assert f"{early} of {told['episodes']} episodes ended early" in capsys.readouterr().out
    for seed in (70, 71, 72):
        video_path, actions_path = clip_paths(tmp_path, seed)
        assert len(read_video(video_path).frames) == len(read_actions(actions_path, ACTIONS)) == 24


def test_a_hunter_of_the_real_game_sees_monsters_and_kills_some(tmp_path, vizdoom):
    kills = 0
    with open_doom(RecordOptions(tmp_path, scenario="defend_the_line")) as doom:
        for seed in range(3):
            doom.start(seed)
            doom.press("none", 0)
            monsters = view_of(doom.state).monsters
            assert len(monsters) >= 4
            assert all(abs(monster.offset) < 0.5 and monster.area > 0 for monster in monsters)
            for _ in range(40):
                doom.press(doom.choose(), 4)
            kills += doom.game.get_game_variable(vizdoom.GameVariable.KILLCOUNT)
    assert kills >= 3


def test_the_deathmatch_begins_armed_with_monsters_about(tmp_path, vizdoom):
    with open_doom(RecordOptions(tmp_path, scenario="deathmatch")) as doom:
        doom.start(5)
        chaingun = 4  # the key of its slot
        assert doom.game.get_game_variable(vizdoom.GameVariable.SELECTED_WEAPON) == chaingun
        assert doom.game.get_episode_time() > 400
        assert view_of(doom.state).pickups


def test_recording_leaves_nothing_where_it_was_started(tmp_path, monkeypatch, vizdoom):
    monkeypatch.chdir(tmp_path)
    record_clips(tmp_path / "gameplay", clips=1, frames=2)
    assert [path.name for path in tmp_path.iterdir()] == ["gameplay"]


def test_an_unknown_scenario_lists_the_known_ones(command, tmp_path, vizdoom):
    outcome = command("record", "--out", tmp_path / "out", "--scenario", "e1m1")
    outcome.assert_refused(r"unknown scenario 'e1m1', expected one of: .*my_way_home")
    assert not (tmp_path / "out").exists()


def test_a_player_is_chosen_by_name(tmp_path, command, vizdoom):
    names = "explorer, roamer, hunter, sentry"
    outcome = command("record", "--out", tmp_path / "out", "--policy", "spy")
    outcome.assert_refused(f"policy must be one of {names}, got 'spy'")
    with open_doom(RecordOptions(out=tmp_path, policy="explorer")) as doom:
        doom.start(0)
        assert doom.player.style is PLAYERS["explorer"]


def test_the_command_says_what_it_recorded(recording, command):
    size = ("--size", f"{HEIGHT_PX}x{WIDTH_PX}", "--frames", FRAMES)
    outcome = command(
        "record", "--out", recording, "--clips", 2, "--first-seed", 70, *size, "--json"
    )
    assert (outcome.code, outcome.document) == (0, {"recorded": 0, "clips": 2, "episodes": 0})


def test_without_vizdoom_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ValueError, match=r"needs vizdoom: pip install -e '\.\[doom\]'"):
        record_clips(tmp_path / "out")
    assert not (tmp_path / "out").exists()
