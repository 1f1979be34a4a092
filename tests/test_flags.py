"""Where a command writes is looked at before it works."""

import re
import sys
from typing import Any

import pytest

COMMANDS = [
    ("evaluate", "--clips", "clips", "--out"),
    ("train", "--tokens", "tokens", "--out"),
    ("finetune", "--tokens", "tokens", "--init", "doom", "--out"),
    ("tune", "--tokens", "tokens", "--out"),
    ("tokenize", "--clips", "clips", "--out"),
    ("record", "--out"),
    ("report", "--results", "results", "--out"),
    ("convert", "source"),
]
FILES = [
    ("generate", "--output"),
    ("attention", "--output"),
    ("study", "--pairs", "pairs", "--chart"),
    ("study", "--pairs", "pairs", "--answers"),
]


@pytest.mark.parametrize("flags", COMMANDS, ids="-".join)
def test_a_folder_below_a_file_is_refused(flags, command, tmp_path):
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "new"
    command(*flags, below).assert_refused(rf"{below} cannot be written: .* is a file")
    command(*flags, tmp_path / "file").assert_refused("is a file, expected a folder")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("flags", FILES, ids="-".join)
def test_a_folder_in_place_of_a_file_is_refused(flags, command, tmp_path):
    command(*flags, tmp_path).assert_refused("is a folder, expected a file name")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", FILES, ids="-".join)
def test_a_file_in_a_folder_that_is_not_there_is_refused(flags, command, tmp_path):
    message = rf"output folder does not exist: {tmp_path}/none"
    command(*flags, tmp_path / "none" / "a.png").assert_refused(message)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_the_numbers_beside_a_figure_is_refused(command, tmp_path):
    (tmp_path / "map.json").mkdir()
    outcome = command("attention", "--output", tmp_path / "map.png")
    outcome.assert_refused(r"map\.json is a folder, expected a file name")


def test_a_file_system_that_takes_nothing_is_told(command):
    command("attention", "--output", "/proc/a.png").assert_refused(
        r"/proc/a\.png cannot be written \(.*\)"
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("generate", "--frames", "1.5"), "--frames: expected a whole number, got '1.5'"),
        (("tokenize", "--clips", "clips"), r"Missing: --out PATH folder to write; .* \(required\)"),
        (("tokenize", "--batch", "8"), r"unknown flag --batch: did you mean --batch-size\?"),
    ],
)
def test_a_mistake_is_told_alike_in_every_encoding(flags, message, encoding, command):
    """The box that is taken off is another one where the output cannot hold its lines."""
    stdout: Any = sys.stdout
    stdout.reconfigure(encoding=encoding)
    outcome = command(*flags)
    assert outcome.code == 2
    assert re.fullmatch(f"error: {message}\n", outcome.err)
