"""Actions that are vectors: words, bins, files."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from diagd.data.actions import as_actions, parse_actions, read_actions
from diagd.data.vectors import VectorActions, load_actions

ARM = VectorActions(("lift", "grip.pos"), (-1.0, 0.0), (1.0, 5.0), bins=5)


@pytest.mark.parametrize(
    ("action", "numbers", "ids"),
    [
        ("none", (0, 0), (2, 5)),
        ("move(0.5,5)", (0.5, 5), (3, 9)),
        ("move(7,-7)", (7, -7), (4, 5)),  # clipped
        ("lift=min", (-1, 0), (0, 5)),
        ("lift=min+lift=max+grip.pos=2.4e+00", (0, 2.4), (2, 7)),
        ("lift=+0.5 + grip.pos=max", (0.5, 5), (3, 9)),
    ],
)
def test_a_number_becomes_the_nearest_bin_of_its_axis(action, numbers, ids):
    assert ARM.numbers_of(action).tolist() == pytest.approx(numbers)
    assert ARM.tokens_of(action) == ids
    assert (ARM.num_tokens, ARM.num_ids) == (2, 10)


@pytest.mark.parametrize(
    "action",
    ["", "jump", "lift", "lift=", "lift=nan", "lift=1e999", "move(1)", "move(1,inf)", "a=1"],
)
def test_other_words_are_refused_with_the_axes(action):
    expected = r"unknown action .*, expected none or move\(lift,grip\.pos\) or words joined by \+"
    with pytest.raises(ValueError, match=expected):
        ARM.tokens_of(action)


def test_an_axis_that_never_moved_has_one_bin_and_rest_may_be_anywhere():
    still = VectorActions(("lift", "grip"), (2.0, -1.0), (2.0, 1.0), bins=3, rest=(2.0, -1.0))
    assert still.tokens_of("none") == (0, 3)
    assert still.tokens_of("grip=0") == (0, 4)
    assert VectorActions(("lift",), (2.0,), (3.0,)).resting == (2.0,)


def test_vectors_are_read_from_words_lists_and_objects(tmp_path):
    lines = [{"action": "lift=max"}, {"action": [0.5, 1]}, {"action": {"grip.pos": 5}}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_actions(path, ARM) == ["lift=max", "move(0.5,1)", "grip.pos=5"]
    assert as_actions(np.array([[0.5, 1.0]]), ARM) == ["move(0.5,1.0)"]
    assert as_actions(torch.tensor([[0.5, 1.0]]), ARM) == ["move(0.5,1.0)"]
    mixed: Any = [(0.5, 1), "lift=max", 0]
    assert as_actions(mixed, ARM) == ["move(0.5,1.0)", "lift=max", "none"]
    assert parse_actions("move(0.5,1)*2,lift=min", ARM) == ["move(0.5,1)"] * 2 + ["lift=min"]
    for bad in ([0.5], ["a", 1], [[1], 2], 3, None):
        path.write_text(json.dumps({"action": bad}))
        with pytest.raises(ValueError, match=r"a\.jsonl:1: (expected|unknown action)"):
            read_actions(path, ARM)


def test_axes_are_kept_in_the_file_of_actions(tmp_path):
    path = tmp_path / "actions.json"
    ARM.save(path)
    assert load_actions(path) == ARM
    fields = json.loads(path.read_text())
    for changes, message in (
        ({"axes": []}, "axes must be distinct and not empty, got 0"),
        ({"axes": ["a", "a"]}, "axes must be distinct"),
        ({"axes": ["a+b", "c"]}, r"names of axes must be letters, .* got 'a\+b'"),
        ({"lowest": [0.0]}, "lowest, highest and rest must be 2 finite numbers"),
        ({"lowest": ["a", "b"]}, "must be 2 finite numbers"),
        ({"rest": [3.0, 0.0]}, r"lift: expected lowest <= rest <= highest, got -1\.0, 3\.0, 1\.0"),
        ({"bins": 1}, r"bins must be in \[2, 16384\] for 2 axes, got 1"),
        ({"colour": 1}, "colour"),
    ):
        path.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=rf"actions\.json: not axes of vectors.*{message}"):
            load_actions(path)


def test_the_nearest_name_is_that_of_the_axis_that_is_farthest_from_rest():
    assert ARM.nearest_name("move(0.2,4)") == "grip.pos=max"
    assert ARM.nearest_name("move(-0.8,1)") == "lift=min"
    assert ARM.nearest_name("move(0.2,0.5)") == "none"
