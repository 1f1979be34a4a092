"""What `diagd tune` is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diagd.decoding.layout import RowStart, check_row_start
from diagd.decoding.strategies.diagonal import Diagonal, Scheduled
from diagd.decoding.strategies.strategy import Conditions
from diagd.decoding.strategies.table import parse_strategies
from diagd.families.presets import available_models
from diagd.flags import Device, OutputFolder, RowLags

Axis = Literal["frame", "row", "column"]
ROW_STARTS: tuple[RowStart, ...] = ("predecessor", "temporal", "spatial")


@dataclass(frozen=True)
class TuneOptions:
    """Measure what strategies cost a model on held-out clips; name the fastest within tolerance.

    Candidates are those with a schedule: k=1, k=2,d=28/predecessor, zipar=4. Raster is always in.
    """

    tokens: Path  # folder from diagd tokenize, whose held-out part is taken, or of token shards
    model: str = "doom"  # bundled model or checkpoint folder
    baseline: str | None = None  # model whose raster order is the yardstick; default: the model's
    tolerance: float = 0.02  # nats a token above raster that a strategy may cost
    strategy: tuple[str, ...] = ()  # candidates by name; none: the diagonals of the next three
    row_lag: RowLags = ()  # default 1, 2, 4, 8
    overlap: bool = False  # actions are known ahead, so frames may overlap
    row_start: tuple[RowStart, ...] = ROW_STARTS  # stand-ins to try
    by: tuple[Axis, ...] = ()  # show the gap by frame, row or column, too
    clips: int | None = None  # held-out clips to judge by; default 16, or all
    frames: int | None = None  # frames of a clip; default: as many as the model holds
    context_frames: int = 1  # of them, frames that are given
    seed: int = 0  # of the place of a window in its clip
    device: Device = "cpu"  # cpu, cuda, cuda:1
    out: OutputFolder | None = None  # folder for tune.json and plots
    make_default: bool = False  # let the model's folder decode so where nothing else is asked for

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more, got {self.tolerance}")
        for name in ("clips", "context_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.make_default and self.model in available_models():
            raise ValueError(f"make_default changes a folder of yours, and {self.model} is bundled")
        if not self.row_start:
            raise ValueError("row_start must name at least one policy")
        for row_start in self.row_start:
            check_row_start(row_start)
        if self.strategy and (self.row_lag or self.overlap or self.row_start != ROW_STARTS):
            raise ValueError("strategy names the candidates: leave row_lag, overlap, row_start out")
        self.named()
        for row_lag in self.row_lag:
            Diagonal(row_lag).check(Conditions(temperature=0))

    def named(self) -> list[Scheduled]:
        """Return the candidates that `strategy` names.

        Raises:
            ValueError: no such strategy, or one without a schedule.
        """
        named: list[Scheduled] = []
        for strategy in parse_strategies(self.strategy):
            if not isinstance(strategy, Scheduled):
                raise ValueError(f"tune compares schedules: leave {strategy} out")
            strategy.check(Conditions(temperature=0))
            named.append(strategy)
        return named
