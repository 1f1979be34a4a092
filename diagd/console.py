"""Terminal output: tables that fit, and progress that can be read in a log as well.

A pipe or a file has no width unless COLUMNS is set: lines are not folded there, and tables are 80
columns wide. Terminals show a progress bar; other outputs get a progress line now and then.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

Item = TypeVar("Item")

FIRST_LINE_S = 10.0  # until the first line of progress in a log
NEXT_LINE_S = 30.0  # between later lines
UNFOLDED = 10_000  # columns of an output without width
TABLE_WIDTH = 80  # columns of tables there
MAX_MARKS = 256  # progress marks kept per job


def make_console(shown: bool = True) -> Console:
    """Return a console for the current stdout; pass False in all but one of several processes."""
    console = Console(highlight=False, markup=False, quiet=not shown)
    has_width = console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ
    if not (has_width and console.width):  # COLUMNS=0 means no width
        console.width = UNFOLDED
    return console


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_labels: int = 1,
) -> None:
    """Print a table, split into blocks if too wide; each repeats the first `num_labels` columns."""
    columns = []
    for place, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(cell_len, column))
        padded = [(cell, " " * (width - cell_len(cell))) for cell in column]
        columns.append([c + gap if place < num_labels else gap + c for c, gap in padded])
    labels, rest = columns[:num_labels], columns[num_labels:]
    console.print(Text(title), soft_wrap=True)
    max_width = TABLE_WIDTH if console.width == UNFOLDED else console.width
    while rest:
        block = [*labels, rest.pop(0)]
        while rest and _width([*block, rest[0]]) <= max_width:
            block.append(rest.pop(0))
        titles, *lines = ("  ".join(cells).rstrip() for cells in zip(*block, strict=True))
        console.print(Text(titles, "bold"), soft_wrap=True)
        for line in ("-" * _width(block), *lines, ""):
            console.print(Text(line), soft_wrap=True)


def print_records(
    console: Console, title: str, columns: Mapping[str, str], records: Sequence[dict[str, Any]]
) -> None:
    """Print a table of records, given a heading and a format for each column."""
    rows = [[cell(form, record) for form in columns.values()] for record in records]
    print_table(console, title, [heading.strip() for heading in columns], rows)


def cell(form: str, record: dict[str, Any]) -> str:
    """Format one cell of a record, or a dash if it has no value."""
    try:
        return form.format(**record)
    except (KeyError, TypeError):
        return "-"


def _width(columns: list[list[str]]) -> int:
    return sum(cell_len(column[0]) + 2 for column in columns) - 2


class Job:
    """A job in progress: `done` and `total` count items, or are a share and 1.0."""

    def __init__(self, what: str, total: float, done: float, show: Callable[["Job"], None]) -> None:
        self.what, self.total, self.done = what, total, done
        self._marks, self._show = [(time.monotonic(), done)], show  # times and counts so far

    def advance(self, count: int = 1) -> None:
        self.reach(self.done + count)

    def reach(self, done: float) -> None:
        self.done = done
        self._marks.append((time.monotonic(), done))
        if len(self._marks) > MAX_MARKS:
            self._marks = [self._marks[0], *self._marks[2::2]]
        self._show(self)

    def describe(self, what: str) -> None:
        self.what = what
        self._show(self)

    @property
    def pace(self) -> str:
        """Items done, items per second, and the time left (at the end, the time taken)."""
        (started, first), now = self._marks[0], time.monotonic()
        seconds, done = now - started, self.done - first
        counts = not isinstance(self.total, float)
        text = f"{self.done}/{self.total}" if counts else f"{self.done:.0%}"
        if not done:
            return text
        rate = done / max(seconds, 1e-9)
        if counts:
            text += f", {rate:.3g}/s" if rate >= 1 else f", {1 / rate:.3g} s each"
        if self.done >= self.total:
            return f"{text}, took {duration(seconds)}"
        # at the slower of two rates: overall, and over the latest half
        middle, before = self._marks[(len(self._marks) - 1) // 2]
        each = max(seconds / done, (now - middle) / max(self.done - before, 1e-9))
        return f"{text}, about {duration((self.total - self.done) * each)} left"


def duration(seconds: float) -> str:
    """Format a time in its two largest units: `8 h 34 min`, `2 min 5 s`, `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def progress(what: str, total: float, done: float = 0, shown: bool = True) -> Iterator[Job]:
    """Show the progress of a long job; `done` counts what an earlier run completed."""
    console = make_console()
    if shown and console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[pace]}")
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total, pace="")
            bar.update(task, completed=done)

            def move(job: Job) -> None:
                bar.update(task, description=job.what, completed=job.done, pace=job.pace)

            job = Job(what, total, done, move)
            move(job)
            yield job
        return
    due, is_late = time.monotonic() + FIRST_LINE_S, False

    def write(job: Job) -> None:
        nonlocal due, is_late
        if shown and time.monotonic() >= due and job.done < job.total:
            print(f"{job.what}: {job.pace}", flush=True)
            due, is_late = time.monotonic() + NEXT_LINE_S, True

    job = Job(what, total, done, write)
    yield job
    if is_late:
        print(f"{job.what}: {job.pace}", flush=True)


def track(
    items: Iterable[Item], what: str, total: int | None = None, done: int = 0
) -> Iterator[Item]:
    """Yield items and show progress; `total` if items have no length, `done` as in `progress`."""
    count = len(items) if isinstance(items, Sequence) else total
    assert count is not None
    with progress(what, count, done) as job:
        for item in items:
            yield item
            job.advance()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that a job without countable progress is running."""
    if (console := make_console()).is_terminal:
        with console.status(what):
            yield
        return
    over, started = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = FIRST_LINE_S
        while not over.wait(pause):
            print(f"{what}: {duration(time.monotonic() - started)} so far", flush=True)
            pause = NEXT_LINE_S

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()
