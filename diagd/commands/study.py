"""The paper's human evaluation: which of two videos is better? Blind, in the browser.

diagd study --pairs pairs --make 10               # dream ten pairs: raster and k=1, same seeds
diagd study --pairs pairs                         # ask; prints the addresses of study and results
diagd study --pairs pairs --results --chart study.png
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diagd.web.study.chart import write_chart
from diagd.web.study.making import MakeOptions, make_pairs
from diagd.web.study.pairs import find_pairs
from diagd.web.study.server import LOOPBACK, listen, results_of, study_server
from diagd.web.study.store import StudyStore
from diagd.web.study.tally import OUTCOMES, summarise


@dataclass(frozen=True)
class StudyOptions:
    """Show two videos side by side, ask which is better, and count wins, ties and losses."""

    pairs: Path  # folder with a sub-folder of equally named clips for each system
    compare: tuple[str, ...] = ()  # A:B, such as k=1:raster; a win is a vote for A
    questions: tuple[Literal["quality", "consistency", "controllability"], ...] = ()
    """default: all; controllability only if every clip has actions (jsonl)"""
    answers: Path | None = None  # SQLite file; default: study.db in the folder of pairs
    results: bool = False  # print what the answers say, and ask nobody
    chart: Path | None = None  # with --results: draw the paper's stacked bars as this png
    host: str = "127.0.0.1"  # address to listen on
    names: tuple[str, ...] = ()  # host names of this machine, for raters elsewhere
    port: int = 8766  # 0 takes a free one
    make: int = 0  # dream so many pairs into the folder first, and ask nobody
    systems: tuple[str, ...] = ("raster", "k=1")  # with --make: raster, k=2, k=1@MODEL ...
    clips: Path | None = None  # with --make: mp4 + jsonl to continue; default: the model's prompt
    model: str = "doom"  # with --make: the bundled model, or a checkpoint folder
    frames: int = 24  # with --make: frames to dream
    context_frames: int = 4  # with --make: frames of the prompt that are seen and shown
    seed: int = 0  # of the dreams, and of the order and sides that each rater gets

    def __post_init__(self) -> None:
        for name, least in (("make", 0), ("frames", 1), ("context_frames", 1), ("port", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.make and self.results:
            raise ValueError("choose one of --make and --results")
        if self.chart and not self.results:
            raise ValueError("a chart needs --results")
        if self.chart and self.chart.suffix != ".png":
            raise ValueError(f"chart must end in .png, got {self.chart}")
        if self.host not in LOOPBACK and not self.names:
            raise ValueError(
                f"host {self.host} lets others in: say under which --names they reach this machine"
            )


def main(options: StudyOptions) -> dict[str, Any]:
    """Make pairs, ask about them, or say what was answered."""
    console = Console()
    if options.make:
        return _make(options, console)
    path = options.answers or options.pairs / "study.db"
    if options.results:
        return _results(path, options.chart, console)
    pairs = find_pairs(options.pairs, options.compare, options.questions)
    store = StudyStore(path, pairs)
    try:
        door = listen(options.host, options.port)
        port = door.getsockname()[1]
        name = (*options.names, options.host)[0]
        address = f"http://{f'[{name}]' if ':' in name else name}:{port}/"
        lines = [f"{first} against {second}" for first, second in pairs.comparisons]
        lines += [f"{len(pairs.clips)} pairs each; answers go to {path}"]
        lines += [f"study    {address}", f"results  {address}results?key={store.results_key}"]
        console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
        study_server(pairs, store, options.seed, port, options.names).run(sockets=[door])
    finally:
        store.close()
    return {"address": address, "answers": str(path)}


def _make(options: StudyOptions, console: Console) -> dict[str, Any]:
    wanted = MakeOptions(
        options.make,
        options.systems,
        options.clips,
        options.model,
        options.frames,
        options.context_frames,
        options.seed,
    )
    systems = make_pairs(options.pairs, wanted)
    console.print(f"ask: diagd study --pairs {options.pairs}", soft_wrap=True, markup=False)
    return {"pairs": str(options.pairs), "systems": systems, "num_pairs": options.make}


def _results(path: Path, chart: Path | None, console: Console) -> dict[str, Any]:
    store = StudyStore(path)
    try:
        results = summarise(*results_of(store))
    finally:
        store.close()
    if chart is not None:
        write_chart(results, chart)
    for comparison in results["comparisons"]:
        for question, cell in comparison["questions"].items():
            title = f"{comparison['first']} against {comparison['second']}: {question}"
            console.print(_table(title, cell))
    for note in results["notes"]:
        console.print(note, style="dim")
    return results


def _table(title: str, cell: dict[str, Any]) -> Table:
    table = Table(title=escape(title), box=SIMPLE)
    for column in ("", *OUTCOMES, "win rate", "95% interval", "p"):
        table.add_column(column, justify="right" if column else "left")
    rows = [("all raters", cell["overall"]), ("by clip", cell["by_clip"])]
    for name, tally in (*rows, *cell["raters"].items()):
        rate, interval = "-", "-"
        if tally["win_rate"] is not None:
            rate = f"{tally['win_rate']:.2f}"
            interval = " to ".join(f"{end:.2f}" for end in tally["win_rate_interval"])
        counts = (str(tally[outcome]) for outcome in OUTCOMES)
        table.add_row(escape(name), *counts, rate, interval, f"{tally['sign_test']:.3g}")
    return table
