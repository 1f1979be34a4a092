"""ZipAR with an adaptive window (arXiv:2412.04062); `zipar_frame` says how it goes."""

from dataclasses import dataclass
from typing import Annotated

from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.strategies.strategy import Conditions, Spelled, Strategy, check_least


@dataclass(frozen=True)
class AdaptiveZipAR(Strategy):
    """Rows in parallel, each started when its first token stands; frame by frame, one batch row.

    Attributes:
        window: tokens of the row above that a row needs before its first token is drawn.
    """

    word = "zipar-adaptive"
    remembers = True  # what waits is drawn again from the newest probabilities
    window: Annotated[int, Spelled("=")]

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError for a window out of its range and several batch rows as well."""
        if conditions.grid is not None:
            DiagonalSchedule(conditions.grid, self.window)
        check_least(self, window=1)
        if conditions.batch_size > 1:
            raise ValueError(f"{self} decodes one batch row, got {conditions.batch_size}")
        super().check(conditions)
