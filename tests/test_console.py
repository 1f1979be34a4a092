"""Tables at any width, and what a log says of long work."""

import re
import time

import pytest
from rich.console import Console

from diagd import console as printing
from diagd.console import make_console, print_table, progress, track, waiting

HEADER = ["strategy", "steps", "ms/step", "tokens/s", "= raster"]
ROWS = [
    ["raster", "672", "12.58", "80", "100%"],
    ["k=1/predecessor [mine]", "74", "1016.25", "564", "94%"],
]


def printed_at(width, capsys):
    print_table(Console(width=width), "speed", HEADER, ROWS)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [5, 30, 34, 40, 47, 80, 200])
def test_no_width_cuts_a_cell_or_loses_a_column(width, capsys):
    out = printed_at(width, capsys)
    words = out.split()
    for text in [*HEADER[1:], *(cell for row in ROWS for cell in row[1:])]:
        assert all(words.count(word) >= 1 for word in text.split()), text
    for row in ROWS:
        blocks = sum(line.startswith("strategy") for line in out.splitlines())
        assert sum(line.startswith(row[0]) for line in out.splitlines()) == blocks
    if width >= 34:
        assert max(map(len, out.splitlines())) <= width


def test_columns_that_fit_stand_side_by_side(capsys):
    assert printed_at(200, capsys).count("strategy") == 1
    assert printed_at(47, capsys).count("strategy") == 2
    assert printed_at(33, capsys).count("strategy") == 4


def test_lines_in_a_pipe_are_not_folded_and_tables_take_80_columns(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width >= 1000
    print_table(make_console(), "speed", HEADER * 4, [row * 4 for row in ROWS])
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(60, 81)
    monkeypatch.setenv("COLUMNS", "72")
    assert make_console().width == 72
    monkeypatch.setenv("COLUMNS", "0")  # a terminal of no known size, where nothing would be shown
    assert make_console().width >= 1000


def test_brackets_are_printed_as_they_are(capsys):
    make_console().print("dreaming at http://[fd00::1]:8421, wrote a[b].mp4")
    assert capsys.readouterr().out == "dreaming at http://[fd00::1]:8421, wrote a[b].mp4\n"


@pytest.fixture
def clock(monkeypatch):
    """Let time stand still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(printing.time, "monotonic", lambda: now[0])
    return now


def test_a_log_hears_of_long_work_now_and_then(clock, capsys):
    with progress("training", 100, done=20) as job:
        for step in range(21, 101):
            clock[0] += 1
            job.advance()
            job.describe(f"training, loss {1 / step:.3f}")
    assert capsys.readouterr().out.splitlines() == [
        "training, loss 0.034: 30/100, 1/s, about 1 min 10 s left",
        "training, loss 0.017: 60/100, 1/s, about 40 s left",
        "training, loss 0.011: 90/100, 1/s, about 10 s left",
        "training, loss 0.010: 100/100, 1/s, took 1 min 20 s",
    ]


def test_slow_steps_are_told_in_seconds_each_and_hours(clock, capsys):
    with progress("judging", 300) as job:
        clock[0] += 90
        job.advance()
    first, _ = capsys.readouterr().out.splitlines()
    assert first == "judging: 1/300, 90 s each, about 7 h 28 min left"


def test_the_time_left_follows_work_that_became_slower_and_promises_nothing_too_early(
    clock, capsys
):
    """Ten items take a second each, and the next ten 31 s: so will the last twenty."""
    with progress("judging", 40) as job:
        for item in range(20):
            clock[0] += 1 if item < 10 else 31
            job.advance()
    *_, told, _ = capsys.readouterr().out.splitlines()
    assert told == "judging: 20/40, 16 s each, about 10 min 20 s left"


def test_long_work_keeps_few_marks(clock):
    with progress("training", 10_000) as job:
        for _ in range(9_000):
            clock[0] += 1
            job.advance()
    assert len(job._marks) <= printing.MAX_MARKS
    assert job.pace == "9000/10000, 1/s, about 16 min 40 s left"


def test_quick_work_is_silent_in_a_log(capsys):
    assert list(track([3, 1, 2], "reading")) == [3, 1, 2]
    assert list(track(iter("ab"), "reading", 2)) == ["a", "b"]
    assert capsys.readouterr().out == ""


def test_one_of_several_processes_tells(clock, capsys):
    with progress("training", 3, shown=False) as job:
        clock[0] += 100
        job.advance()
    assert capsys.readouterr().out == ""


def test_work_that_fails_claims_no_end(clock, capsys):
    def work():
        with progress("training", 3) as job:
            clock[0] += 100
            job.advance()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        work()
    assert capsys.readouterr().out.count("\n") == 1


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress("training", 3) as job:
        job.advance()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "training" in shown
    assert "1/3" in shown
    assert "━" in shown


def test_a_log_hears_of_what_cannot_be_counted_if_it_takes_long(monkeypatch, capsys):
    with waiting("dreaming"):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(printing, "FIRST_LINE_S", 0.01)
    with waiting("dreaming"):
        end = time.monotonic() + 10
        while not (out := capsys.readouterr().out) and time.monotonic() < end:
            time.sleep(0.01)
    assert out == "dreaming: 0 s so far\n"
