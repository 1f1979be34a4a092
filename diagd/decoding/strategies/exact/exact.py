"""Strategies that verify drafts by the noise of their place: raster's tokens in fewer steps."""

from dataclasses import dataclass
from typing import Annotated

from diagd.decoding.strategies.strategy import Promise, Spelled, Strategy, check_least

LANES = 32  # where what is written depends on the lanes, so that it does not on the machine


@dataclass(frozen=True)
class Exact(Strategy):
    """Raster's tokens, whatever its options: they say how steps are spent.

    Equal means bit for bit where the model gives a lane the same logits whoever shares its step, as
    the native kernels do; elsewhere rounding may turn a tie. Frames overlap wherever their actions
    are known. Batch rows share their lanes, so the slowest sets the pace.

    Attributes:
        num_lanes: most lanes of a step; None measures what a step costs here, and chooses.
        draft_lag: columns that the drafts of a row keep behind those of the row above; 0 drafts
            nothing ahead. None: as the statistics have it.
        draft_width: columns by which the drafts of a row advance in a step.
    """

    word = "exact"
    num_lanes: Annotated[int | None, Spelled(",lanes=")] = None
    draft_lag: Annotated[int | None, Spelled(",draft-lag=")] = None
    draft_width: Annotated[int, Spelled(",draft-width=")] = 3

    def __post_init__(self) -> None:
        check_least(self, num_lanes=1, draft_lag=0, draft_width=1)

    @property
    def promise(self) -> Promise:
        """Raster's tokens."""
        return "tokens"


@dataclass(frozen=True)
class Jacobi(Strategy):
    """`Exact` without drafts ahead: plain Jacobi decoding (arXiv:2305.10427)."""

    word = "jacobi"
    num_lanes: Annotated[int | None, Spelled(",lanes=")] = None

    def __post_init__(self) -> None:
        check_least(self, num_lanes=1)

    @property
    def promise(self) -> Promise:
        """Raster's tokens."""
        return "tokens"


@dataclass(frozen=True)
class Tolerant(Strategy):
    """`Exact`, but a draft stays that so many times its probability would have drawn.

    Attributes:
        tolerance: at least 1; 1 is exact.
        num_lanes: most lanes of a step; what is written depends on it.
    """

    word = "tolerance"
    tolerance: Annotated[float, Spelled("=")]
    num_lanes: Annotated[int, Spelled(",lanes=")] = LANES

    def __post_init__(self) -> None:
        check_least(self, num_lanes=1)
        if not 1 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be at least 1 and finite, got {self.tolerance}")

    @property
    def promise(self) -> Promise:
        """Raster's tokens at a tolerance of 1."""
        return "tokens" if self.tolerance == 1 else "no"
