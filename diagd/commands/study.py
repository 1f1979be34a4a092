"""The paper's human evaluation: which of two videos is better? Blind, in the browser.

diagd study --pairs pairs --make 10      # dream ten pairs: raster and k=1
diagd study --pairs pairs                # ask; prints where raters go
diagd study --pairs pairs --results --chart study.png
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diagd.console import make_console
from diagd.flags import OutputFile
from diagd.web.address import listen, url_of
from diagd.web.study.app import results_of
from diagd.web.study.make_pairs import MakeOptions, make_pairs
from diagd.web.study.pairs import find_pairs
from diagd.web.study.results import summarise
from diagd.web.study.results_views import print_results, write_chart
from diagd.web.study.server import LOOPBACK, study_server
from diagd.web.study.store import StudyStore

Systems = Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--strategy"])]


@dataclass(frozen=True)
class StudyOptions:
    """Show two videos side by side, ask which is better, and count wins, ties and losses."""

    pairs: Path  # folder with a sub-folder of equally named clips for each system
    compare: tuple[str, ...] = ()  # A:B, such as k=1:raster; a win is a vote for A
    questions: tuple[Literal["quality", "consistency", "controllability"], ...] = ()
    """default: all; controllability only if every clip has actions (jsonl)"""
    answers: OutputFile | None = None  # SQLite file; default: study.db in the folder of pairs
    results: bool = False  # print what the answers say, and ask nobody
    chart: OutputFile | None = None  # with --results: draw the paper's stacked bars as this png
    host: str = "127.0.0.1"  # address to listen on
    names: tuple[str, ...] = ()  # host names of this machine, for raters elsewhere
    port: int = 8766  # 0 takes a free one
    make: int = 0  # dream so many pairs into the folder first, and ask nobody
    systems: Systems = ("raster", "k=1")  # with --make: strategies, such as k=2, k=1@MODEL, exact
    clips: Path | None = None  # with --make: mp4 + jsonl to continue; default: the model's prompt
    model: str = "doom"  # with --make: the bundled model, or a checkpoint folder
    frames: int = 24  # with --make: frames to dream
    context_frames: int = 4  # with --make: frames of the prompt that are seen and shown
    seed: int = 0  # of the dreams, and of the order and sides that each rater gets

    def __post_init__(self) -> None:
        for name, least in (("make", 0), ("frames", 1), ("context_frames", 1)):
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
    if options.make:
        return _make(options)
    path = options.answers or options.pairs / "study.db"
    return _results(path, options.chart) if options.results else _ask(path, options)


def _make(options: StudyOptions) -> dict[str, Any]:
    wanted = MakeOptions(
        num_pairs=options.make,
        systems=options.systems,
        clips=options.clips,
        model=options.model,
        frames=options.frames,
        context_frames=options.context_frames,
        seed=options.seed,
    )
    systems = make_pairs(options.pairs, wanted)
    make_console().print(f"ask: diagd study --pairs {options.pairs}", soft_wrap=True)
    return {"pairs": str(options.pairs), "systems": systems, "num_pairs": options.make}


def _results(path: Path, chart: Path | None) -> dict[str, Any]:
    with contextlib.closing(StudyStore(path)) as store:
        results = summarise(*results_of(store))
    if chart is not None:
        write_chart(results, chart)
    print_results(results, make_console())
    return results


def _ask(path: Path, options: StudyOptions) -> dict[str, Any]:
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(listen(options.host, options.port))
        port = listening.getsockname()[1]
        pairs = find_pairs(options.pairs, options.compare, options.questions)
        store = opened.enter_context(contextlib.closing(StudyStore(path, pairs)))
        address = url_of((*options.names, options.host)[0], port) + "/"
        lines = [f"{first} against {second}" for first, second in pairs.comparisons]
        lines += [f"{len(pairs.clips)} pairs each; answers go to {path}"]
        lines += [f"study    {address}", f"results  {address}results?key={store.results_key}"]
        make_console().print("\n".join(lines), soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            study_server(pairs, store, options.seed, port, options.names).run(sockets=[listening])
    return {"address": address, "answers": str(path)}
