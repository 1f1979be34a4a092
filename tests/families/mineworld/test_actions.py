import itertools
import json
import math
from pathlib import Path

import pytest

from diagd.data.actions import read_actions
from diagd.families.mineworld import (
    BEGIN,
    BUTTONS,
    END,
    FIRST_PITCH,
    FIRST_YAW,
    GROUPS,
    MU,
    NULL,
    MinecraftActions,
    camera_bin,
)
from tests.golden import FIXTURES

FIXTURE = FIXTURES / "minecraft_actions.json"
CASES = json.loads(FIXTURE.read_text())["cases"]  # lines, and the tokens MineWorld's code gives
CODEC = MinecraftActions()
PITCH_0, YAW_0 = FIRST_PITCH + 10, FIRST_YAW + 10
# Between neighbouring bins, from the facts about MineWorld.
EDGES = (1.0541, 3.6068, 6.8928, 11.1225, 16.567, 23.5754, 32.5966, 44.2089, 59.1564, 78.3971)


def vpt(keys=(), dx: object = 0.0, dy: object = 0.0, buttons=()):
    mouse = {"dx": dx, "dy": dy, "buttons": list(buttons)}
    return {"keyboard": {"keys": [f"key.keyboard.{key}" for key in keys]}, "mouse": mouse}


def bin_degrees(number: int) -> float:
    """Return the turn at the centre of a bin."""
    curved = (number - 10) / 10
    return 90 * math.copysign(math.expm1(abs(curved) * math.log1p(MU)) / MU, curved)


def test_every_recorded_line_has_mineworlds_tokens():
    assert len(CASES) == 134
    for record, tokens in CASES:
        assert list(CODEC.tokens_of(CODEC.action_of(record))) == tokens, record


def test_nothing_that_tokens_tell_is_lost():
    """Every choice of every group, every bin of both axes has words, and they its tokens."""
    choices = [[NULL, *map(BUTTONS.index, group)] for group in GROUPS]
    count = 0
    for number, buttons in enumerate(itertools.product(*choices)):
        if number % 7 and NULL in buttons[1:5]:
            continue  # a part is enough
        camera = FIRST_PITCH + number % 21, FIRST_YAW + number // 21 % 21
        tokens = (BEGIN, *camera, *buttons, END)
        words = [BUTTONS[token] for token in buttons if token != NULL]
        turns = (bin_degrees(number % 21), bin_degrees(number // 21 % 21))
        action = "+".join([*words, "camera({},{})".format(*turns)])
        assert CODEC.tokens_of(action) == tokens
        assert CODEC.action_of({"action": action}) == action
        count += 1
    assert count > 441  # all pairs of bins have been there


@pytest.mark.parametrize(
    ("action", "buttons"),
    [
        ("none", {}),
        ("forward", {4: "forward"}),
        ("forward+jump+attack", {4: "forward", 7: "attack", 8: "jump"}),
        (" forward + jump ", {4: "forward", 8: "jump"}),
        ("hotbar.3", {3: "hotbar.3"}),
        ("hotbar.9+hotbar.3", {3: "hotbar.3"}),
        (
            "back+left+sneak+use+pickItem",
            {4: "back", 5: "left", 6: "sneak", 7: "use", 9: "pickItem"},
        ),
        ("forward+back", {}),
        ("sprint+sneak+right+right", {5: "right"}),
        ("jump+sneak", {6: "sneak", 8: "jump"}),
    ],
)
def test_words_press_buttons_in_their_slots(action, buttons):
    tokens = [BEGIN, PITCH_0, YAW_0, *[NULL] * 7, END]
    for slot, name in buttons.items():
        tokens[slot] = BUTTONS.index(name)
    assert CODEC.tokens_of(action) == tuple(tokens)


@pytest.mark.parametrize(
    ("action", "pitch", "yaw"),
    [
        ("camera(0,0)", 10, 10),
        ("camera(-90,90)", 0, 20),
        ("camera(+200,-1e3)", 20, 0),
        ("camera( 5 , -2.25 )", 12, 9),
        ("look_left", 10, 8),
        ("look_right+look_up", 8, 12),
        ("look_left+look_right", 10, 10),
        ("look_down+camera(5,30)", 13, 16),
    ],
)
def test_cameras_turn_and_add_up(action, pitch, yaw):
    tokens = CODEC.tokens_of(action)
    assert tokens[1:3] == (FIRST_PITCH + pitch, FIRST_YAW + yaw)
    assert set(tokens[3:-1]) == {NULL}


def test_camera_bins_have_their_edges_and_centres():
    for number, edge in enumerate(EDGES):
        assert [camera_bin(edge - 1e-3), camera_bin(edge + 1e-3)] == [10 + number, 11 + number]
        assert [camera_bin(1e-3 - edge), camera_bin(-1e-3 - edge)] == [10 - number, 9 - number]
    assert [camera_bin(bin_degrees(number)) for number in range(21)] == list(range(21))


@pytest.mark.parametrize("px", [-5000, -14, -13, -7, -6.7, -6.6, 0, 6, 6.7, 13, 14, 20, 133, 134])
def test_mouse_pixels_become_degrees_without_their_fraction(px):
    degrees = math.trunc(px * 360 / 2400)
    expected = f"camera(0,{degrees})" if degrees else "none"
    assert CODEC.action_of(vpt(dx=px)) == expected
    assert CODEC.action_of(vpt(dy=px)) == (f"camera({degrees},0)" if degrees else "none")


@pytest.mark.parametrize(
    ("record", "action"),
    [
        (vpt(["w", "space", "left.control"]), "forward+sprint+jump"),
        (vpt(["w", "s", "a"], buttons=[0, 2]), "left+attack+pickItem"),
        (vpt(["space", "left.shift"], buttons=[0, 1]), "none"),
        (vpt(["left.shift", "left.control", "5"]), "hotbar.5"),
        (vpt(["e", "f", "escape", "tab", "f3"], buttons=[7]), "none"),  # no token stands for them
        (vpt(["d"], 70, -7) | {"hotbar": 3, "isGuiOpen": False, "tick": 9}, "right+camera(-1,10)"),
        ({"forward": 1, "camera": [0.5, -12.75]}, "forward+camera(0.5,-12.75)"),
        ({"forward": 0, "inventory": 1, "ESC": True}, "none"),
        ({"camera": [0, 0]}, "none"),
    ],
)
def test_lines_of_files_become_words(record, action):
    assert CODEC.action_of(record) == action


def test_the_names_are_single_words_of_different_meaning():
    assert CODEC.names[0] == "none"
    assert len({CODEC.tokens_of(name) for name in CODEC.names}) == len(CODEC.names) == 25
    assert all(
        0 <= token < CODEC.num_ids for name in CODEC.names for token in CODEC.tokens_of(name)
    )
    assert len(CODEC.tokens_of("none")) == CODEC.num_tokens
    assert 8192 + CODEC.num_ids == 8262  # MineWorld's vocabulary


@pytest.mark.parametrize("word", ["", "walk", "Forward", "inventory", "hotbar.0", "look"])
def test_an_unknown_word_lists_the_known_ones(word):
    message = (
        rf"unknown action '{word}', expected words joined by \+ of: none, forward, back, .*YAW\)"
    )
    with pytest.raises(ValueError, match=message):
        CODEC.tokens_of(f"forward+{word}")


@pytest.mark.parametrize(
    "word", ["camera", "camera()", "camera(1)", "camera(1,2,3)", "camera(a,b)", "camera(nan,0)"]
)
def test_a_camera_takes_two_finite_numbers(word):
    with pytest.raises(ValueError, match=r"expected camera\(PITCH,YAW\) in degrees, got 'camera"):
        CODEC.tokens_of(word)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, r"expected an action, a VPT recording or button names, got \{\}"),
        ({"action": 3}, r'expected \{"action": WORDS\}, got \{"action": 3\}'),
        ({"action": "walk"}, "unknown action 'walk'"),
        ({"walk": 1}, "unknown button 'walk', expected camera or one of: use, attack"),
        ({"mouse": {}}, "unknown button 'mouse'"),
        ({"forward": 2}, "button forward must be 0 or 1, got 2"),
        ({"forward": "1"}, 'button forward must be 0 or 1, got "1"'),
        ({"forward": [1]}, r"button forward must be 0 or 1, got \[1\]"),
        ({"camera": [1]}, r'expected "camera": \[PITCH, YAW\] in degrees, got \[1\]'),
        ({"camera": [0, float("nan")]}, r'expected "camera": .* got \[0, NaN\]'),
        ({"camera": [0, 10**400]}, r'expected "camera": .* got \[0, 1000'),
        ({"camera": "0,0"}, 'expected "camera": .* got "0,0"'),
        ({"keyboard": {"keys": "w"}, "mouse": {}}, r'expected "keyboard": \{"keys": \[NAME'),
        ({"keyboard": {"keys": [3]}, "mouse": {}}, r'expected "keyboard": .* got \{"keys": \[3'),
        ({"keyboard": None, "mouse": {}}, r'expected "keyboard": .* got null'),
        (vpt() | {"mouse": None}, r'expected "mouse": \{"dx": PX, .* got null'),
        (vpt() | {"mouse": {"buttons": []}}, r'expected "mouse": .* got \{"buttons": \[\]\}'),
        (vpt(dx="3"), r'expected "mouse": .* got \{"dx": "3"'),
        (vpt(dy=float("inf")), r'expected "mouse": .* got \{"dx": 0.0, "dy": Infinity'),
        (vpt(buttons=["left"]), r'expected "mouse": .*"buttons": \["left"\]'),
    ],
)
def test_a_bad_line_says_what_was_expected(record, message):
    with pytest.raises(ValueError, match=message) as caught:
        CODEC.action_of(record)
    assert "\n" not in str(caught.value)


def test_a_vpt_file_is_read_line_by_line_and_never_evaluated(tmp_path):
    path = tmp_path / "walk.jsonl"
    path.write_text(json.dumps(vpt(["w"])) + "\n" + json.dumps(vpt(buttons=[0])) + "\n")
    assert read_actions(path, CODEC, 2) == ["forward", "attack"]
    path.write_text("{'forward': __import__('os').mkdir('gone')}\n")
    with pytest.raises(ValueError, match=r"walk\.jsonl:1: expected a JSON object, got"):
        read_actions(path, CODEC)
    assert not Path("gone").exists()
