import json

import numpy as np
import pytest
import torch

from diagd.families.wham.actions import FIRST_IDS, WHAMActions, actions_of_rows
from tests.golden import FIXTURES

FIXTURE = FIXTURES / "wham_actions.json"
CASES = json.loads(FIXTURE.read_text())["cases"]  # rows of npz files, and the tokens of WHAM's code
CODEC = WHAMActions()
REST = (*range(0, 24, 2), 29, 40, 51, 62)


def rest(**changes):
    """Sixteen tokens of doing nothing, but for some places."""
    return tuple(changes.get(f"place{place}", token) for place, token in enumerate(REST))


def test_every_recorded_action_has_whams_tokens():
    assert len(CASES) == 30
    actions = actions_of_rows(np.asarray([row for row, _ in CASES], dtype=np.float32))
    for (row, tokens), action in zip(CASES, actions, strict=True):
        assert list(CODEC.tokens_of(action)) == tokens
        assert CODEC.action_of({"action": row}) == action
        assert CODEC.action_of({"action": action}) == action
        assert CODEC.action_of({"buttons": row[:12], "sticks": row[12:]}) == action


def test_every_button_and_bin_keeps_its_token():
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([2] * 12 + [11] * 4)
    for draw in torch.rand(200, 16, generator=generator):
        values = (draw * counts).long()
        (action,) = actions_of_rows([values.tolist()])
        assert CODEC.tokens_of(action) == tuple((torch.tensor(FIRST_IDS) + values).tolist())


@pytest.mark.parametrize(
    ("action", "tokens"),
    [
        ("none", REST),
        ("button1", rest(place0=1)),
        ("button12+button3", rest(place2=5, place11=23)),
        ("stick1=0", rest(place12=24)),
        ("stick4=10+button1", rest(place0=1, place15=67)),
        ("stick2=max", rest(place13=45)),
        ("stick2=min+stick2=max", REST),
        ("stick3=7+stick3=6", rest(place14=54)),
        ("stick3=max+stick3=max", rest(place14=56)),
        ("stick3=5+none", REST),
    ],
)
def test_words_are_buttons_and_bins(action, tokens):
    assert CODEC.tokens_of(action) == tokens


def test_the_names_are_single_words_of_different_meaning():
    assert CODEC.names[0] == "none"
    assert len({CODEC.tokens_of(name) for name in CODEC.names}) == len(CODEC.names) == 21
    assert (CODEC.num_tokens, CODEC.num_ids) == (16, 68)


@pytest.mark.parametrize(
    "word", ["", "walk", "button0", "button13", "stick1", "stick1=", "stick1=11", "stick5=1", "a=1"]
)
def test_an_unknown_word_says_what_is_known(word):
    message = (
        rf"unknown action '{word}', expected words .* button1 to button12, stick1=BIN to stick"
    )
    with pytest.raises(ValueError, match=message):
        CODEC.tokens_of(f"button1+{word}")


def row(**changes):
    values = [0.0] * 12 + [5.0] * 4
    return [changes.get(f"place{place}", value) for place, value in enumerate(values)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.0] * 15], r"actions must be \(T, 16\) numbers, got float64 \(1, 15\)"),
        ([0.0] * 16, r"actions must be \(T, 16\) numbers, got float64 \(16,\)"),
        ([], r"actions must be \(T, 16\) numbers, got float64 \(0,\)"),
        ([["a"] * 16], r"actions must be \(T, 16\) numbers, got <U1 \(1, 16\)"),
        ([row(), row(place0=2)], "action 1: button1 must be a whole number from 0 to 1, got 2.0"),
        ([row(place11=0.5)], "action 0: button12 must be a whole number from 0 to 1, got 0.5"),
        ([row(place12=11)], "action 0: stick1 must be a whole number from 0 to 10, got 11.0"),
        ([row(place15=-1)], "action 0: stick4 must be a whole number from 0 to 10, got -1.0"),
        ([row(place13=float("nan"))], "action 0: stick2 must be a whole number .* got nan"),
    ],
)
def test_rows_that_are_no_actions_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        actions_of_rows(rows)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, r'expected \{"action": WORDS\}, .* got \{\}'),
        ({"action": None}, r'expected \{"action": WORDS\}, .* got \{"action": null\}'),
        ({"action": [[0] * 16]}, r'expected \{"action": WORDS\}, .* got \{"action": \[\[0, 0'),
        ({"action": [10**400] * 16}, r"actions must be \(T, 16\) numbers, got object"),
        ({"action": [0] * 15}, r"actions must be \(T, 16\) numbers, got int64 \(1, 15\)"),
        ({"action": "walk"}, "unknown action 'walk'"),
        ({"buttons": [0] * 12}, r'expected .* got \{"buttons": \[0'),
        (
            {"buttons": [0] * 11, "sticks": [5] * 4},
            "expected 12 buttons and 4 sticks, got 11 and 4",
        ),
        ({"buttons": [0] * 12, "sticks": [0.3] * 4}, "stick1 must be a whole number from 0 to 10"),
    ],
)
def test_a_bad_line_says_what_was_expected(record, message):
    with pytest.raises(ValueError, match=message):
        CODEC.action_of(record)
