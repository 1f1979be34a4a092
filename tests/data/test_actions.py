import json

import numpy as np
import pytest
import torch

from diagd.data.actions import (
    ActionVocabulary,
    as_actions,
    idle_action,
    parse_actions,
    read_actions,
    split_actions,
    write_actions,
)
from diagd.families.mineworld import MinecraftActions

VOCABULARY = ActionVocabulary(("none", "forward", "left", "forward+left"))


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("forward", ["forward"]),
        ("forward*3,left", ["forward", "forward", "forward", "left"]),
        (" left * 2 , none ", ["left", "left", "none"]),
        ("forward+left*2,forward*1", ["forward+left", "forward+left", "forward"]),
    ],
)
def test_a_string_of_actions_is_spelled_out(text, actions):
    assert parse_actions(text, VOCABULARY) == actions


def test_a_comma_in_brackets_ends_no_action():
    text = "camera(-5,1.5)*2,jump+camera(0,3),none"
    actions = ["camera(-5,1.5)"] * 2 + ["jump+camera(0,3)", "none"]
    assert parse_actions(text, MinecraftActions()) == actions


@pytest.mark.parametrize(
    "text", ["left*", "left*0", "left*1000000", "left*-1", "left*1.5", "left*²", "left*2*3"]
)
def test_a_count_must_be_a_positive_integer_of_six_digits(text):
    message = r"actions must look like forward\*8,left\*4 \(counts from 1 to 999999\), got "
    with pytest.raises(ValueError, match=message):
        parse_actions(text, VOCABULARY)


@pytest.mark.parametrize(("text", "name"), [("jump", "jump"), ("left,,left", ""), ("", "")])
def test_an_unknown_action_lists_the_known_ones(text, name):
    message = rf"unknown action '{name}', expected one of: none, forward, left, forward\+left$"
    with pytest.raises(ValueError, match=message):
        parse_actions(text, VOCABULARY)


@pytest.mark.parametrize(
    "given",
    [
        "left*2,forward+left",
        ["left", "left", "forward+left"],
        ("left", "left", "forward+left"),
        [2, 2, 3],
        ["left", 2, 3],
        np.array([2, 2, 3], dtype=np.uint8),
        np.array(["left", "left", "forward+left"]),
        torch.tensor([2, 2, 3]),
        iter(["left", "left", "forward+left"]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_actions_are_words_names_or_numbers(given):
    assert as_actions(given, VOCABULARY) == ["left", "left", "forward+left"]


def test_the_last_action_of_a_string_goes_on_and_that_of_a_list_does_not():
    assert as_actions("none,left", VOCABULARY, 4) == ["none", "left", "left", "left"]
    assert as_actions("none,left", VOCABULARY, 1) == ["none", "left"]
    assert as_actions(["none", "left"], VOCABULARY, 4) == ["none", "left"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([4], r"actions as numbers must be in \[0, 4\), got 4"),
        (torch.tensor([0, -1]), r"actions as numbers must be in \[0, 4\), got -1"),
        ([1.0], r"actions must be a string such as .*, or \(T,\) integers, got 1\.0"),
        ([True], r"got True"),
        (np.zeros((1, 2), np.int64), r"got \[0, 0\]"),
        (["left", "jump"], r"unknown action 'jump', expected one of: none, forward, left"),
        (torch.tensor(3), r"actions must be a string such as .*, got 3"),
        (5, r"actions must be a string such as .*, got 5"),
    ],
)
def test_what_is_no_action_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        as_actions(given, VOCABULARY)


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (("left", "NOOP"), "NOOP"),
        (("left", "no-op"), "no-op"),
        (("up", "Stay"), "Stay"),
        (("waiting", "nothing_else"), "waiting"),
        (("left", "right"), "left"),
        (("a", "none", "noop"), "none"),
    ],
)
def test_the_idle_action_is_known_by_its_name_or_else_the_first(names, idle):
    assert idle_action(ActionVocabulary(names)) == idle
    assert idle_action(MinecraftActions()) == "none"


def test_a_file_of_actions_comes_back_as_written(tmp_path):
    path = tmp_path / "walk.jsonl"
    write_actions(path, ["none", "left", "forward+left"])
    assert path.read_text().splitlines()[1] == '{"action": "left"}'
    actions = ["none", "left", "forward+left"]
    assert read_actions(path, VOCABULARY) == actions
    assert read_actions(path, VOCABULARY, num_frames=3) == actions


@pytest.mark.parametrize(("num_frames", "given"), [(2, 3), (4, 3)])
def test_a_file_of_another_length_tells_both_lengths(num_frames, given, tmp_path):
    path = tmp_path / "walk.jsonl"
    write_actions(path, ["none"] * given)
    message = rf"walk\.jsonl: expected {num_frames} actions, got {given}$"
    with pytest.raises(ValueError, match=message):
        read_actions(path, VOCABULARY, num_frames)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"action": "left"', r"walk\.jsonl:2: expected a JSON object, got '\{\"action\""),
        ('{"move": "left"}', r"walk\.jsonl:2: expected \{\"action\": NAME\}, got \{\"move\""),
        ('["left"]', r"walk\.jsonl:2: expected a JSON object, got '\[\"left\"\]'"),
        ("", r"walk\.jsonl:2: expected a JSON object, got ''"),
        ('{"a":' * 100_000, r"walk\.jsonl:2: expected a JSON object, got"),
        ('{"action": ' + "9" * 5000 + "}", r"walk\.jsonl:2: expected a JSON object, got"),
        ('{"action": "jump"}', r"walk\.jsonl:2: unknown action 'jump', expected one of: none, f"),
        ('{"action": 1}', r"walk\.jsonl:2: expected \{\"action\": NAME\}, got \{\"action\": 1\}"),
        (
            '{"action": ["left"]}',
            r"walk\.jsonl:2: expected \{\"action\": NAME\}, got \{\"action\": \[\"left",
        ),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path):
    path = tmp_path / "walk.jsonl"
    path.write_text('{"action": "left"}\n' + line + '\n{"action": "left"}\n')
    with pytest.raises(ValueError, match=message):
        read_actions(path, VOCABULARY)


def test_windows_may_have_written_a_file_with_its_mark_and_line_ends(tmp_path):
    path = tmp_path / "walk.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"action": "left"}\r\n{"action": "none"}\r\n')
    assert read_actions(path, VOCABULARY) == ["left", "none"]


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"action file not found: .*/walk\.jsonl"):
        read_actions(tmp_path / "walk.jsonl", VOCABULARY)
    (tmp_path / "walk.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"walk\.jsonl: expected a text file in UTF-8"):
        read_actions(tmp_path / "walk.jsonl", VOCABULARY)


def test_a_vocabulary_comes_back_as_saved(tmp_path):
    VOCABULARY.save(tmp_path / "actions.json")
    assert ActionVocabulary.load(tmp_path / "actions.json") == VOCABULARY
    assert [VOCABULARY.tokens_of(name) for name in VOCABULARY.names] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("names", [None, "left", {"left": 0}, ["left", 1]])
def test_names_that_are_no_list_of_strings_are_refused(names, tmp_path):
    path = tmp_path / "actions.json"
    path.write_text(json.dumps({"names": names}))
    with pytest.raises(ValueError, match=r"actions\.json: expected an action vocabulary"):
        ActionVocabulary.load(path)


@pytest.mark.parametrize("names", [(), ("left", "left")])
def test_names_must_be_distinct_and_not_empty(names):
    with pytest.raises(ValueError, match="action names must be distinct and not empty, got"):
        ActionVocabulary(names)


def test_a_double_name_in_a_file_is_one_line_that_names_it(tmp_path):
    (tmp_path / "actions.json").write_text('{"names": ["left", "left"]}')
    with pytest.raises(ValueError, match=r"actions\.json: action names must be distinct"):
        ActionVocabulary.load(tmp_path / "actions.json")


def test_a_recording_s_actions_stand_between_its_given_frames_and_lead_on():
    actions = ["none", "left", "left", "forward", "right"]
    assert split_actions(actions, 3) == (["left", "left"], ["forward", "right"])
    assert split_actions(actions, 1) == ([], actions[1:])
    assert split_actions(None, 3) == (None, None)
