import json
import sys
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.recorders.gym import (
    check_actions,
    named,
    native,
    open_gym,
    random_actions,
    suitable_size,
)
from diagd.data.recorders.recording import RecordOptions, clip_paths, record
from diagd.data.video import read_video
from tests.data.recorders import scroller

HERE = "tests.data.recorders.scroller"
FRAMES = 12


def options_for(folder, game="Scroller", **changes):
    given = {"out": folder, "gym": f"{HERE}:{game}-v0", "clips": 3, "frames": FRAMES}
    return RecordOptions(**{**given, "first_seed": 70, "size": "32x64", **changes})


def record_clips(folder, game="Scroller", **changes):
    return record(options_for(folder, game, **changes))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Record three short clips of a game that names its own actions."""
    folder = tmp_path_factory.mktemp("clips")
    assert record_clips(folder) == {"recorded": 3, "clips": 3, "episodes": 3}
    return folder


def test_a_recording_is_clips_with_an_action_for_every_frame(recording):
    """Ten frames a second of the 30 that the game has, whose words for doing are taken over."""
    assert len(list(recording.iterdir())) == 7
    vocabulary = ActionVocabulary.load(recording / "actions.json")
    assert vocabulary.names == ("none", "left", "right", "look_up")
    for seed in (70, 71, 72):
        video_path, actions_path = clip_paths(recording, seed)
        video = read_video(video_path)
        assert (tuple(video.frames.shape), video.fps) == ((FRAMES, 32, 64, 3), Fraction(10))
        actions = read_actions(actions_path, vocabulary, FRAMES)
        assert actions[0] == "none"
        assert len(set(actions)) > 1


def test_pictures_of_two_sizes_are_no_clip(tmp_path, monkeypatch):
    with open_gym(options_for(tmp_path)) as game:
        monkeypatch.setattr(
            type(game),
            "press",
            lambda self, *_: np.zeros((24 + next(sizes), 40, 3), np.uint8),
        )
        sizes = iter(range(9))
        with pytest.raises(
            ValueError, match=r": pictures must be of one size, got \(24, 40, 3\) a"
        ):
            record_clips(tmp_path)


def test_row_t_led_to_frame_t(tmp_path):
    """Frames are equal exactly where the row says that nothing was done on the way to them."""
    with open_gym(options_for(tmp_path)) as game:
        game.start(3)
        rows = ["none"]
        pictures = [game.press("none", 0)]
        while len(rows) < 60:
            rows.append(game.choose())
            pictures.append(game.press(rows[-1], 2))
        expected = game.env.unwrapped.place - (100, 120)
    moves = list(scroller.MOVES.values())
    steps = [moves[game.actions.id_of(row)] for row in rows[1:]]
    assert (2 * np.sum(steps, axis=0) == expected).all()
    for t in range(1, 60):
        before, after = pictures[t - 1 : t + 1]
        assert before is not None
        assert after is not None
        assert np.array_equal(after, before) == (rows[t] == "none")


def test_the_same_seed_records_the_same_clip_in_any_order_and_what_is_there_is_kept(
    recording, tmp_path
):
    """A second machine starts at clip 71, was killed after its actions, and has clip 72 already."""
    clip_paths(tmp_path, 71)[1].write_text("half")
    for path in clip_paths(tmp_path, 72):
        path.write_text("kept")
    assert record_clips(tmp_path, first_seed=71, clips=2) == {
        "recorded": 1,
        "clips": 2,
        "episodes": 1,
    }
    for ours, theirs in zip(clip_paths(tmp_path, 71), clip_paths(recording, 71), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert [path.read_text() for path in clip_paths(tmp_path, 72)] == ["kept", "kept"]
    frames = [read_video(clip_paths(recording, seed)[0]).frames for seed in (70, 71)]
    assert not torch.equal(*frames)


def test_where_the_game_has_no_action_for_doing_nothing_it_waits(tmp_path):
    record_clips(tmp_path, "Turner", clips=1, frames=40, repeat=1)
    assert ActionVocabulary.load(tmp_path / "actions.json").names == ("none", "left", "right")
    with open_gym(options_for(tmp_path, "Turner")) as game:
        game.start(0)
        game.press("none", 5)
        assert game.env.unwrapped.steps == 0
        assert game.values == {"none": None, "left": 1, "right": 2}


def test_an_own_player_and_own_actions(tmp_path):
    """The player sees observations: 4 skipped steps, then 3 steps for each frame."""
    player = {"policy": f"{HERE}:Pilot", "actions": f"{HERE}:ACTIONS", "skip": 4}
    record_clips(tmp_path, "Silent", clips=1, frames=5, **player)
    vocabulary = ActionVocabulary.load(tmp_path / "actions.json")
    assert vocabulary.names == ("none", "left", "right", "up")
    taken = read_actions(clip_paths(tmp_path, 70)[1], vocabulary, 5)
    assert taken == ["none", "right", "left", "right", "left"]


def test_modules_of_the_working_folder_are_found(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_game.py").write_text(
        "import gymnasium\n"
        f"gymnasium.register('Mine-v0', '{HERE}:Scroller')\nKEYS = dict(none=0, up=3)\n"
    )
    flags = ("--gym", "my_game:Mine-v0", "--actions", "my_game:KEYS", "--clips", 1, "--frames", 2)
    outcome = command("record", *flags, "--out", "clips", "--json")
    assert (outcome.code, outcome.document) == (0, {"recorded": 1, "clips": 1, "episodes": 1})
    assert str(tmp_path) not in sys.path


def test_another_start_is_tried_where_an_episode_ends_too_early(tmp_path):
    """A mayfly lives for 11 steps: three frames of three steps after the first."""
    record_clips(tmp_path, "Mayfly", clips=1, frames=4)
    with pytest.raises(ValueError, match=r"Mayfly-v0 ended before 5 frames 20 times in a row: use"):
        record_clips(tmp_path, "Mayfly", clips=1, frames=5, first_seed=0)


def test_the_random_player_holds_what_it_does_and_does_everything():
    walks = []
    for seed in (3, 3, 4):
        walk = random_actions(("none", "left", "right"), np.random.default_rng(seed))
        walks.append([next(walk) for _ in range(400)])
    assert walks[0] == walks[1] != walks[2]
    assert set(walks[0]) == {"none", "left", "right"}
    changes = sum(a != b for a, b in zip(walks[0], walks[0][1:], strict=False))
    assert 400 / 8 / 2 < changes < 400 / 3


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        ((400, 600), (64, 96)),
        ((210, 160), (96, 80)),
        ((96, 96), (96, 96)),
        ((40, 70), (32, 64)),
        ((150, 1200), (16, 96)),
    ],
)
def test_the_size_keeps_the_shape_of_the_picture(picture, size):
    assert suitable_size(*picture) == size


@pytest.mark.parametrize(
    ("game", "changes", "message"),
    [
        ("Silent", {}, r"Silent-v0 does not name its actions \(Discrete\(4\)\): write a dict"),
        ("Blind", {}, r"Blind-v0 must render a \(height, width, 3\) uint8 picture, got NoneType"),
        ("Missing", {}, "Missing-v0: Environment `Missing` doesn't exist"),
        ("Scroller", {"policy": "left"}, "expected module:name, got 'left'"),
        ("Scroller", {"policy": "nowhere:play"}, "Scroller-v0: No module named 'nowhere'"),
        ("Scroller", {"policy": f"{HERE}:play"}, "has no 'play'"),
        (
            "Scroller",
            {"policy": f"{HERE}:confused"},
            r"the player must return one of: no.*; got 'jump'",
        ),
        ("Scroller", {"policy": f"{HERE}:mute"}, r"its player: 'NoneType' .* \(TypeError\)"),
        ("Scroller", {"policy": f"{HERE}:ACTIONS"}, r"its player: 'dict' .* \(TypeError\)"),
        (
            "Scroller",
            {"policy": f"{HERE}:dizzy"},
            "the player must return one of: none.*; got array",
        ),
        ("Scroller", {"policy": f"{HERE}:lost"}, r"its player: 0 \(KeyError, .*scroller.py:\d+\)$"),
        ("Scroller", {"actions": f"{HERE}:NUMBERED"}, "Scroller-v0: action names .*, got 1"),
        ("Scroller", {"actions": f"{HERE}:TOO_MANY"}, "does not accept 7 for 'left', expected one"),
        ("Scroller", {"actions": f"{HERE}:NOT_FIRST"}, "the first action must be 'none'"),
        ("Scroller", {"actions": f"{HERE}:LISTED"}, "scroller:LISTED must be a dict, got a list"),
    ],
)
def test_what_cannot_be_recorded_is_refused(game, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        record_clips(tmp_path / "out", game, **changes)
    assert not list(tmp_path.rglob("clip_*"))


CAMERA = spaces.Box(-1, 1, (2,), np.float32)
PARTS = {"move": spaces.Discrete(3), "look": CAMERA}


@pytest.mark.parametrize(
    ("space", "written"),
    [
        (spaces.Discrete(3, start=-1), 1),
        (spaces.Box(-1, 1, (), np.float64), 0.25),
        (spaces.Box(0, 255, (2, 1), np.uint8), [[3], [255]]),
        (spaces.MultiBinary((2, 3)), [[0, 1, 1], (True, False, False)]),
        (spaces.MultiDiscrete([3, 5]), np.array([2.0, 4.0])),
        (spaces.Tuple((PARTS["move"], CAMERA)), (1, (0.5, 0))),
        (spaces.Dict(PARTS), {"move": 1, "look": [0.5, 0]}),
        (
            spaces.Dict(hand=spaces.Tuple([spaces.Dict(PARTS)])),
            {"hand": [{"move": 2, "look": (0, 1)}]},
        ),
        (spaces.Sequence(CAMERA), [(0.5, 0), (1, 1)]),
        (spaces.OneOf([PARTS["move"], CAMERA]), (1, (0.5, 0))),
        (spaces.Text(4), "jump"),
    ],
)
def test_a_game_gets_what_its_space_holds_down_to_the_parts(space, written):
    """Of the types that the space draws, anew in each step, for a game may write into them."""

    def kinds(value):
        if isinstance(value, dict | tuple):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            return type(value), {key: kinds(part) for key, part in parts}
        return type(value), getattr(value, "dtype", None)

    class Game:
        action_space = space

    check_actions(Game, "Game-v0", {"none": None, "act": written})
    given = native(space, written)
    assert space.contains(given)
    if not isinstance(space, spaces.Sequence | spaces.OneOf | spaces.Text):
        assert kinds(given) == kinds(space.sample())
    if isinstance(given, np.ndarray):
        assert native(space, written) is not given


@pytest.mark.parametrize(
    ("space", "written"),
    [
        (spaces.Discrete(3), 1.5),
        (spaces.Discrete(3), "1"),
        (spaces.Discrete(3), [[1], [1, 2]]),
        (spaces.MultiBinary(2), (1, 257)),
        (spaces.MultiDiscrete([3, 5]), (2, float("nan"))),
        (spaces.Box(0, 255, (2,), np.uint8), (-1, 0)),
        (CAMERA, ("0.5", "0")),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [1e300]),
        (spaces.Tuple((PARTS["move"], CAMERA)), 1),
        (spaces.Tuple((PARTS["move"], CAMERA)), (1, (0.5, 0), 1)),
        (spaces.Tuple((PARTS["move"], CAMERA)), (0.5, (0.5, 0))),
        (spaces.Dict(PARTS), {"move": 1}),
        (spaces.Dict(PARTS), {"move": 1, "look": (0.5, 0), "jump": 1}),
        (spaces.Dict(PARTS), [1, (0.5, 0)]),
        (spaces.OneOf([PARTS["move"], CAMERA]), (2, 1)),
    ],
)
def test_an_action_that_would_become_another_one_is_refused(space, written):
    class Game:
        action_space = space

    with pytest.raises(ValueError, match=r"Game-v0 does not accept .* for 'act', expected one of"):
        check_actions(Game, "Game-v0", {"none": None, "act": written})


def _raise(*_, **__):
    raise KeyError("door")


MODES = {"render_modes": ["rgb_array"]}
GREY = np.zeros((40, 70, 3), np.uint8)
OWN_GAMES = {  # what is otherwise than Gymnasium says -> the line
    "no render_mode": ({"__init__": lambda self: None}, r"argument 'render_mode'.* \(TypeError, "),
    "no seed": ({"reset": lambda self: (0, {})}, r"argument 'seed' \(TypeError"),
    "old reset": ({"reset": lambda *_, **__: np.zeros(2)}, "reset must .*, info .*, got ndarray"),
    "old step": (
        {"step": lambda *_: (0, 0.0, False, {})},
        r"step must return observation, .* \(a dict\), got int, float, bool, dict",
    ),
    "ends in an array": ({"step": lambda *_: (0, 0.0, np.zeros(2), False, {})}, "is ambiguous"),
    "error": ({"step": _raise}, r"'door' \(KeyError, .*test_gym.py:\d+\)$"),
    "error in make": ({"__init__": _raise}, r"'door' \(KeyError, .*test_gym.py:\d+\)$"),
    "error in close": ({"close": _raise}, r"'door' \(KeyError, .*test_gym.py:\d+\)$"),
    "no actions": ({"action_space": property(_raise)}, r"'door' \(KeyError"),
    "words are a dict": ({"get_action_meanings": lambda _: {0: "up"}}, "does not name its actions"),
    "words are numbers": ({"get_action_meanings": lambda _: [0, 1]}, "does not name its actions"),
    "no metadata": ({"metadata": None}, "metadata"),
    "rate 0": ({"metadata": MODES | {"render_fps": 0}}, "render_fps of .* up to 100000, got 0$"),
    "rate nan": ({"metadata": MODES | {"render_fps": float("nan")}}, "render_fps of .*, got nan"),
    "rate in words": ({"metadata": MODES | {"render_fps": "30"}}, "render_fps of .*, got '30'"),
    "grows": (
        {"render": lambda self: np.zeros((40 + self.steps, 70, 3), np.uint8)},
        r"must render pictures of one size, got \(40, 70, 3\) and \(43, 70, 3\)",
    ),
    "floats": ({"render": lambda _: GREY / 2}, r"uint8 picture, got float64 \(40, 70, 3\)"),
    "grey": ({"render": lambda _: GREY[..., 0]}, r"uint8 picture, got uint8 \(40, 70\)"),
    "alpha": ({"render": lambda _: GREY[..., [0, 1, 2, 2]]}, r"got uint8 \(40, 70, 4\)"),
    "planes": ({"render": lambda _: GREY.T}, r"uint8 picture, got uint8 \(3, 70, 40\)"),
    "nothing": ({"render": lambda _: GREY[:0]}, r"uint8 picture, got uint8 \(0, 70, 3\)"),
    "list": ({"render": lambda _: [GREY]}, "uint8 picture, got list"),
}


@pytest.mark.parametrize(("changes", "message"), OWN_GAMES.values(), ids=OWN_GAMES)
def test_a_game_that_does_not_keep_to_the_interface_is_named_in_one_line(
    changes, message, tmp_path
):
    game: Any = type("Own", (scroller.Scroller,), changes)
    gymnasium.register("Own-v0", game)
    try:
        with pytest.raises(ValueError, match=f"(?s)^Own-v0.*{message}"):
            record(RecordOptions(out=tmp_path, gym="Own-v0", clips=1, frames=3))
    finally:
        del gymnasium.registry["Own-v0"]
    assert not list(tmp_path.rglob("clip_*"))


def test_a_game_may_draw_into_one_picture_and_have_no_rate(tmp_path):
    class Blinking(scroller.Scroller):
        metadata = MODES
        canvas = np.zeros((32, 64, 3), np.uint8)

        def render(self):
            self.canvas[:] = 20 * self.steps
            return self.canvas

    game: Any = Blinking
    gymnasium.register("Blinking-v0", game)
    try:
        record(RecordOptions(out=tmp_path, gym="Blinking-v0", clips=1, frames=4))
    finally:
        del gymnasium.registry["Blinking-v0"]
    video = read_video(tmp_path / "clip_000000.mp4")
    means = video.frames.float().mean((1, 2, 3))
    assert means.tolist() == pytest.approx([0, 20, 40, 60], abs=3)  # of lossy pictures
    assert video.fps == 10


def test_a_folder_with_other_actions_is_refused(recording):
    with pytest.raises(ValueError, match="holds clips with other actions: use another folder"):
        record_clips(recording, actions=f"{HERE}:ACTIONS", clips=4)
    assert json.loads((recording / "actions.json").read_text())["names"][-1] == "look_up"


def test_a_module_that_needs_another_says_which(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needy.py").write_text("import surely_not_there")
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        named("needy:play")


def test_a_mistake_in_a_module_is_told_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mistaken.py").write_text("import math\nACTIONS = {'none': math.zero}")
    with pytest.raises(AttributeError, match="'math' has no attribute 'zero'"):
        named("mistaken:ACTIONS")


def test_without_gymnasium_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"needs gymnasium: pip install -e '\.\[gym\]'"):
        record_clips(tmp_path / "out")
    assert not (tmp_path / "out").exists()
