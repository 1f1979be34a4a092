"""What `diagd study` is told."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from diagd.decoding.strategies.strategy import Conditions, Strategy, parse_strategy
from diagd.flags import OutputFile

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
        if self.make:
            parse_systems(self.systems, self.model)
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


@dataclass(frozen=True)
class MakeOptions:
    """What to generate.

    Attributes:
        num_pairs: clips of every system.
        systems: as the module describes.
        clips: folder of mp4 + jsonl to continue; None continues the model's own prompt, with
            actions drawn from the seed.
        model: of systems that name none.
        frames, context_frames: generated, and seen before.
        seed: pair n is generated with seed + n.
    """

    num_pairs: int
    systems: tuple[str, ...]
    clips: Path | None
    model: str
    frames: int
    context_frames: int
    seed: int


def parse_systems(texts: Iterable[str], model: str) -> list[tuple[str, str, Strategy]]:
    """Return name, model and strategy of each system.

    Raises:
        ValueError: no strategy, lags that fit no grid, or fewer than two different systems.
    """
    systems = [parse_system(text, model) for text in texts]
    for _, _, strategy in systems:
        strategy.check(Conditions(temperature=1))
    names = [name for name, _, _ in systems]
    if len(set(names)) < max(2, len(names)):
        raise ValueError(f"expected two or more different systems, got {', '.join(names)}")
    return systems


def parse_system(text: str, model: str) -> tuple[str, str, Strategy]:
    """Return name, model and strategy of a system.

    Raises:
        ValueError: no strategy.
    """
    strategy, _, checkpoint = text.partition("@")
    chosen = parse_strategy(strategy)
    name = chosen.name.replace("/", "-")  # it names a folder
    name += f"-{Path(checkpoint).name}" if checkpoint else ""
    return name, checkpoint or model, chosen
