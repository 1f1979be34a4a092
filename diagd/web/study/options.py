"""Options of `diagd study`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diagd.checks import check_at_least
from diagd.decoding.strategies.table import Strategy, parse_strategy
from diagd.flags import OutputFile

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class StudyOptions:
    """Show two videos side by side, ask which is better, and count wins, ties and losses."""

    pairs: Path  # folder with one folder per system, with clips of the same names
    compare: tuple[str, ...] = ()  # A:B, such as k=1:raster; a win is a vote for A
    questions: tuple[Literal["quality", "consistency", "controllability"], ...] = ()
    """default: all; controllability only if every clip has actions (jsonl)"""
    answers: OutputFile | None = None  # SQLite file; default: study.db in the folder of pairs
    results: bool = False  # print the results, without a server
    chart: OutputFile | None = None  # with --results: plot the paper's stacked bars as PNG
    host: str = "127.0.0.1"  # address to listen on
    names: tuple[str, ...] = ()  # host names of this machine, for raters on other machines
    port: int = 8766  # 0: any free port
    make: int = 0  # number of pairs to generate into the folder, without a server
    # with --make: strategies, such as k=2, k=1@MODEL, exact
    strategy: tuple[str, ...] = ("raster", "k=1")
    clips: Path | None = None  # with --make: mp4 + jsonl to continue; default: the model's prompt
    model: str = "doom"  # with --make: bundled model or checkpoint folder
    frames: int = 24  # with --make: frames to generate
    context_frames: int = 4  # with --make: frames of the prompt, seen by the model and shown
    seed: int = 0  # of generation, and of each rater's order and sides

    def __post_init__(self) -> None:
        check_at_least(self, make=0, frames=1, context_frames=1)
        if self.make:
            names = [name for name, *_ in self.parsed_systems()]
            if len(set(names)) < max(2, len(names)):
                raise ValueError(f"expected two or more different systems, got {', '.join(names)}")
        if self.make and self.results:
            raise ValueError("choose one of --make and --results")
        if self.chart and not self.results:
            raise ValueError("a chart needs --results")
        if self.chart and self.chart.suffix != ".png":
            raise ValueError(f"chart must end in .png, got {self.chart}")
        if self.host not in LOOPBACK and not self.names:
            raise ValueError(
                f"host {self.host} accepts other machines: give the host names they use as --names"
            )

    def parsed_systems(self) -> list[tuple[str, str, Strategy]]:
        """Return the name of the folder, the model and the strategy of each system of `--make`."""
        systems = []
        for text in self.strategy:
            spelled, _, checkpoint = text.partition("@")
            strategy = parse_strategy(spelled)
            name = strategy.name.replace("/", "-")  # it names a folder
            name += f"-{Path(checkpoint).name}" if checkpoint else ""
            systems.append((name, checkpoint or self.model, strategy))
        return systems
