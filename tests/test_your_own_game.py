"""Every command of docs/your-own-game.md runs, with less of everything, and ends in a page."""

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from diagd.data.recorders.recording import RecordOptions, record
from diagd.training.check import check_clips

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/your-own-game.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
SCRIPTS = dict(
    re.match(r"# (\w+\.py)\n(.*)", text, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    for kind, text in BLOCKS
    if kind == "python"
)
SMALLER = {
    "record": ("--clips 240", "--clips 12 --frames 33"),
    "tokenize": ("--minutes 5", "--minutes 0.1"),
    "train": ("--minutes 20", "--steps 2 --model mc-ar-128x3"),
    "play": ("--model world", "--model world --no-open --port 0"),
}


def run(command: str, folder: Path) -> str:
    """Run a command of the page in a folder, and return what it printed."""
    with start(command, folder) as process:
        told, _ = process.communicate()
    assert process.returncode == 0, told
    return told


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the page; all that it prints can be read from `stdout`."""
    words = shlex.split(command)
    assert words[0] == "diagd"
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "diagd", *words[1:]],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def smaller(command: str) -> str:
    """Ask for less, where the page asks for so much that a test would take an hour."""
    name = command.split()[1]
    if name in SMALLER:
        much, little = SMALLER[name]
        assert much in command, f"the page no longer says {much}"
        command = command.replace(much, little)
    return command


def test_the_page_goes_from_installing_to_playing():
    names = [command.split()[1] for command in COMMANDS]
    assert names == ["install", "record", "check", "tokenize", "train", "play"]
    extras = re.search(r"\.\[([\w,]+)\]", COMMANDS[0])
    assert extras
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert f"\n{extra} = [" in declared
    assert set(SCRIPTS) == {"racing.py", "mend.py"}
    for name, script in SCRIPTS.items():
        compile(script, name, "exec")


@pytest.mark.slow
def test_every_command_of_the_page_runs_and_ends_in_a_page_to_play(tmp_path):
    pytest.importorskip("Box2D", reason="the page's game needs pip install 'gymnasium[box2d]>=1.3'")
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(script)
    *road, play = COMMANDS[1:]
    told = {command.split()[1]: run(smaller(command), tmp_path) for command in road}
    assert "12 clips, 396 frames of 64x96 px, 10 a second" in told["check"]
    assert "Row t led to frame t, as expected." in told["check"]
    with start(smaller(play), tmp_path) as player:
        try:
            told["play"] = line_with("http", player)
            url = re.findall(r"http\S+", told["play"])[0]
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert b"<html" in answer.read()
        finally:
            player.terminate()
    spoil(tmp_path / "clips")
    assert "row t - 1 led to frame t" in check_clips(tmp_path / "clips").problems[0]
    subprocess.run([sys.executable, "mend.py"], cwd=tmp_path, check=True)
    assert check_clips(tmp_path / "clips").problems == []


def line_with(word: str, process: subprocess.Popen[str]) -> str:
    """Wait until a process prints a line with a word in it."""
    assert process.stdout
    told = ""
    for line in process.stdout:
        told += line
        if word in line:
            return line
    raise AssertionError(told)


@pytest.mark.slow
def test_rows_of_the_other_game_that_diagd_records_are_told_apart_as_well(tmp_path):
    pytest.importorskip("vizdoom", reason="recording needs pip install -e '.[doom]'")
    record(RecordOptions(tmp_path, clips=16, size="48x80"))
    report = check_clips(tmp_path)
    assert report.timing is not None
    assert (report.timing.found, report.problems) == (0, [])
    spoil(tmp_path)
    assert "row t - 1 led to frame t" in check_clips(tmp_path).problems[0]


def spoil(clips: Path) -> None:
    """Let row t be the action that leads away from frame t."""
    for path in clips.glob("*.jsonl"):
        rows = path.read_text().splitlines()
        path.write_text("\n".join([*rows[1:], rows[-1]]) + "\n")
