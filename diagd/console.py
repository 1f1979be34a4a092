"""What commands print: tables that fit, and progress that can be read in a log as well.

A terminal is as wide as it is. A pipe or a file has no width, so nothing is folded there, unless
COLUMNS says so. A bar moves on a terminal; elsewhere a plain line says every now and then how far
the work is.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

Item = TypeVar("Item")

FIRST_LINE_S = 10.0  # after so many seconds a log says how long a job will take,
NEXT_LINE_S = 30.0  # and then every so many how far it is
UNFOLDED = 10_000  # columns of what has no width


def make_console(shown: bool = True) -> Console:
    """Return a console for what stdout is now; of several processes, one shows what it prints."""
    console = Console(highlight=False, markup=False, quiet=not shown)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = UNFOLDED
    return console


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_labels: int = 1,
) -> None:
    """Print a table, whole: columns that do not fit beside the others follow in a further block.

    Args:
        header: the title of each column.
        rows: the cells of each line.
        num_labels: so many first columns name the line, and stand in every block.
    """
    columns = [
        _aligned(column, left=place < num_labels)
        for place, column in enumerate(zip(header, *rows, strict=True))
    ]
    labels, rest = columns[:num_labels], columns[num_labels:]
    console.print(Text(title), soft_wrap=True)
    while rest:
        block = [*labels, rest.pop(0)]
        while rest and _width([*block, rest[0]]) <= console.width:
            block.append(rest.pop(0))
        titles, *lines = ("  ".join(cells).rstrip() for cells in zip(*block, strict=True))
        console.print(Text(titles, "bold"), soft_wrap=True)
        for line in ("-" * _width(block), *lines, ""):
            console.print(Text(line), soft_wrap=True)


def print_tables(
    console: Console,
    titles: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_labels: int = 1,
) -> None:
    """Print rows in a table for each title, of which `titles` names that of each row."""
    for title in dict.fromkeys(titles):
        own = [row for name, row in zip(titles, rows, strict=True) if name == title]
        print_table(console, title, header, own, num_labels)


def _aligned(cells: Sequence[str], left: bool) -> list[str]:
    width = max(map(cell_len, cells))
    gaps = [" " * (width - cell_len(cell)) for cell in cells]
    return [c + gap if left else gap + c for c, gap in zip(cells, gaps, strict=True)]


def _width(columns: list[list[str]]) -> int:
    return len("  ".join("-" * cell_len(column[0]) for column in columns))


class Job:
    """Work under way: how much of it is done, and how long the rest will take.

    Attributes:
        what: its name, which may change on the way.
        done, total: in items, or a share and 1.0.
    """

    def __init__(self, what: str, total: float, done: float, show: Callable[["Job"], None]) -> None:
        self.what, self.total, self.done = what, total, done
        self._first, self._started, self._show = done, time.monotonic(), show

    def advance(self, count: int = 1) -> None:
        """Say that so many more items are done."""
        self.reach(self.done + count)

    def reach(self, done: float) -> None:
        """Say that so much is done."""
        self.done = done
        self._show(self)

    def describe(self, what: str) -> None:
        """Change the name."""
        self.what = what
        self._show(self)

    @property
    def pace(self) -> str:
        """Items done, how many a second, and the time left (at the end, the time taken)."""
        seconds, done = time.monotonic() - self._started, self.done - self._first
        counts = not isinstance(self.total, float)
        text = f"{self.done}/{self.total}" if counts else f"{self.done:.0%}"
        if not done:
            return text
        rate = done / max(seconds, 1e-9)
        if counts:
            text += f", {rate:.3g}/s" if rate >= 1 else f", {1 / rate:.3g} s each"
        left = (self.total - self.done) / rate
        return f"{text}, {_spell(left)} left" if left > 0 else f"{text}, took {_spell(seconds)}"


def _spell(seconds: float) -> str:
    """Write a time with the two units that matter: `8 h 34 min`, `2 min 5 s`, `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def progress(what: str, total: float, done: float = 0, shown: bool = True) -> Iterator[Job]:
    """Show how far a long job is: a bar on a terminal, a line now and then elsewhere.

    Args:
        total: how many items there are, or 1.0 where shares of the whole are counted.
        done: what was done before, by a run that was killed.
        shown: whether to show anything; of several processes, one does.
    """
    console = make_console()
    if not shown:
        yield Job(what, total, done, lambda job: None)
    elif console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[pace]}")
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total, pace="")
            bar.update(task, completed=done)

            def move(job: Job) -> None:
                bar.update(task, description=job.what, completed=job.done, pace=job.pace)

            yield Job(what, total, done, move)
    else:
        due = time.monotonic() + FIRST_LINE_S
        lines = 0

        def write(job: Job) -> None:
            nonlocal due, lines
            if time.monotonic() >= due and job.done < job.total:
                print(f"{job.what}: {job.pace}", flush=True)
                due, lines = time.monotonic() + NEXT_LINE_S, lines + 1

        job = Job(what, total, done, write)
        yield job
        if lines:
            print(f"{job.what}: {job.pace}", flush=True)


def track(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Go through items and show how far that is; `total` counts items that have no length."""
    count = len(items) if isinstance(items, Sequence) else total
    assert count is not None
    with progress(what, count) as job:
        for item in items:
            yield item
            job.advance()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something is under way of which no part can be counted."""
    console = make_console()
    if console.is_terminal:
        with console.status(what):
            yield
        return
    over, started = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = FIRST_LINE_S
        while not over.wait(pause):
            print(f"{what}: {_spell(time.monotonic() - started)} so far", flush=True)
            pause = NEXT_LINE_S

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()
