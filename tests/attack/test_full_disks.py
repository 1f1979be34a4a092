"""Disks that are full or read-only: one line, nothing half-written, and with room it goes on.

The disks are real ones, in memory and as small as wished; only root may mount them.
"""

import contextlib
import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from diagd.families.presets import PRESETS
from diagd.files import append_line, read_json_lines, write_text
from diagd.web.study.pairs import StudyPairs
from diagd.web.study.store import StudyStore
from tests.attack.commands import COMMANDS, flags_of
from tests.worlds import model_config

SIZES_KIB = (4, 12, 24, 48, 80, 128, 200, 320)  # a page, and on until all of it fits
ROOM = "size=64m"
REFUSED = r"error: .*(No space left on device|cannot be written).*\n"


def mount(*arguments: object) -> bool:
    return not subprocess.run(list(map(str, arguments)), capture_output=True).returncode


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an empty disk of 4 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = mount("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder)
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("NO FULL DISK TEST: only root may mount one, and on Linux")
    yield folder
    assert mount("umount", "-l", folder)


def resize(disk: Path, option: str) -> None:
    assert mount("mount", "-o", f"remount,{option}", disk)


def fill(disk: Path) -> Path:
    """Take what room there is left; returns the file that holds it."""
    path = disk / "filling"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def half_written(folder: Path) -> list[Path]:
    return [*folder.rglob("*.partial"), *folder.rglob(".*.lock")]


def test_a_line_that_does_not_fit_is_not_there_and_the_log_goes_on(disk: Path) -> None:
    log = disk / "log.jsonl"
    append_line(log, '{"step": 1}')
    with pytest.raises(OSError, match=r"No space left on device: '.*log\.jsonl'"):
        append_line(log, f'{{"step": "{"2" * 5000}"}}')
    append_line(log, '{"step": 3}')
    assert [line["step"] for line in read_json_lines(log)] == [1, 3]


def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays(disk: Path) -> None:
    write_text(disk / "a.txt", "old")
    for text in ("new", "n" * 5000):
        with pytest.raises(OSError, match=r"No space left on device: '.*/a\.txt'"):
            write_text(disk / "a.txt", text)
    assert [path.name for path in disk.iterdir()] == ["a.txt"]
    assert (disk / "a.txt").read_text() == "old"


def test_a_file_on_a_read_only_disk_is_named(disk: Path) -> None:
    resize(disk, "ro")
    with pytest.raises(OSError, match=r"Read-only file system: '.*/a\.txt'"):
        write_text(disk / "a.txt", "new")


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer a model that is quick to train, in a process where nobody has trained."""
    monkeypatch.setitem(PRESETS, "mc-ar-tiny", model_config())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    name: str, command: Callable[..., Any], world: Path, disk: Path, tmp_path: Path
) -> None:
    out, refused = disk / "out", 0
    flags = flags_of(name, world, tmp_path, out)
    for size in SIZES_KIB:
        resize(disk, f"size={size}k")
        outcome = command(name, *flags)
        assert not half_written(disk), (size, half_written(disk))
        if not outcome.code:
            break
        assert outcome.code == 2, outcome
        assert re.fullmatch(REFUSED, outcome.err.splitlines(keepends=True)[-1]), outcome
        assert "Traceback" not in outcome.said
        refused += 1
    assert refused
    resize(disk, ROOM)
    outcome = command(name, *flags, *(("--force",) if name == "convert" else ()))
    assert not outcome.code, outcome
    elsewhere = tmp_path / "elsewhere"
    assert not command(name, *[elsewhere if flag == out else flag for flag in flags]).code
    assert names_in(out) == names_in(elsewhere)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_read_only_disk_says_so(
    name: str, command: Callable[..., Any], world: Path, disk: Path, tmp_path: Path
) -> None:
    flags = flags_of(name, world, tmp_path, disk / "out")
    resize(disk, "ro")
    outcome = command(name, *flags)
    assert outcome.code == 2, outcome
    assert re.search(r"^error: .*Read-only file system.*\n\Z", outcome.err, re.MULTILINE), outcome


def test_a_study_on_a_full_disk_refuses_an_answer_and_takes_the_next(disk: Path) -> None:
    resize(disk, "size=400k")
    pairs = StudyPairs(Path("pairs"), (("k=1", "raster"),), {"a": None}, ("quality",), "")
    store = StudyStore(disk / "study.db", pairs)
    filling = fill(disk)
    taken = []

    def enrol_everybody() -> None:
        while True:
            taken.append(store.enrol(f"rater {len(taken)}", 0)[0])

    with pytest.raises(sqlite3.OperationalError, match="full"):
        enrol_everybody()
    filling.unlink()
    number, _ = store.rater(store.enrol("late", 0)[0]) or (0, "")
    store.answer(number, 0, "quality", "left")
    assert all(store.rater(token) for token in taken)
    assert len(store.votes()) == 1
    store.close()
