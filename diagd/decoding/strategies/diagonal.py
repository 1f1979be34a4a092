"""Strategies that follow a schedule: diagonals (arXiv:2503.14070, section 3.2), raster, ZipAR."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from diagd.decoding.layout import RowStart, check_row_start
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.strategies.strategy import Conditions, Promise, Spelled, Strategy, check_least


class Scheduled(Strategy):
    """A strategy whose lanes are all known before the first step.

    Attributes:
        lags: its fields that are lags.
        row_start: which token id stands in for a predecessor that is not known yet.
    """

    lags: ClassVar[tuple[str, ...]] = ()
    row_start: RowStart

    @abstractmethod
    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        """Return the schedule of a grid.

        Raises:
            ValueError: lags that do not fit the grid.
        """

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError for lags that do not fit the grid, or fit none where it is unknown."""
        if conditions.grid is not None:
            self.schedule(conditions.grid)
        check_least(self, **dict.fromkeys(self.lags, 1))


@dataclass(frozen=True)
class Diagonal(Scheduled):
    """Diagonal decoding: token (t, i, j) is written at step t * frame_lag + i * row_lag + j.

    Its name is `k=2`, `k=1,d=14` or `k=1/predecessor` (arXiv:2503.14070, section 3.2).

    Attributes:
        row_lag: the paper's k, in [1, width]: columns that a row runs ahead of the next one.
        frame_lag: the paper's d, in [1, (height - 1) * row_lag + width]: steps that a frame starts
            after the one before. None: frames do not overlap.
        row_start: which token stands in for a predecessor that is not known yet: `temporal` (the
            same place a frame earlier), `predecessor` (the predecessor a frame earlier) or
            `spatial` (the newest token of the row above), or `action` (the last action token of the
            frame, which a model can be trained to take for "a row starts").

    Raises:
        ValueError: an unknown row_start; lags are checked when the frames are known.
    """

    word = "k"
    lags = ("row_lag", "frame_lag")
    row_lag: Annotated[int, Spelled("=")]
    frame_lag: Annotated[int | None, Spelled(",d=")] = None
    row_start: Annotated[RowStart, Spelled("/")] = "temporal"

    def __post_init__(self) -> None:
        check_row_start(self.row_start)

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        """Return the schedule of a grid (see `Scheduled`)."""
        return DiagonalSchedule(grid, self.row_lag, self.frame_lag)


@dataclass(frozen=True)
class Raster(Scheduled):
    """Next-token prediction: one token a step."""

    word = "raster"
    row_start: RowStart = field(default="temporal", init=False)  # nothing stands in

    @property
    def promise(self) -> Promise:
        """It is what the others are compared with."""
        return "tokens"

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        """Return the schedule of a grid (see `Scheduled`)."""
        return DiagonalSchedule.raster(grid)


@dataclass(frozen=True)
class ZipAR(Scheduled):
    """ZipAR (arXiv:2412.04062): a row starts once `window` tokens of the row above exist."""

    word = "zipar"
    lags = ("window",)
    window: Annotated[int, Spelled("=")]
    row_start: RowStart = field(default="spatial", init=False)

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        """Return the schedule of a grid (see `Scheduled`)."""
        return DiagonalSchedule.spatial(grid, self.window)
