"""Speculative Jacobi decoding: drafts verified by their probabilities; raster's distribution.

`sjd` (arXiv:2410.01699) keeps or replaces drafts and draws afresh what follows the first one
replaced; `mc-sjd` (arXiv:2510.24211) couples what follows, too, so drafts change as seldom as they
can.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from diagd.decoding.strategies.exact.exact import LANES
from diagd.decoding.strategies.strategy import Conditions, Promise, Spelled, Strategy, check_least


@dataclass(frozen=True)
class SpeculativeJacobi(Strategy):
    """Speculative Jacobi decoding (arXiv:2410.01699).

    Attributes:
        num_lanes: most lanes of a step; what is written depends on it.
    """

    word = "sjd"
    remembers = True  # what drafts were drawn from is remembered
    afresh: ClassVar[bool] = True
    num_lanes: Annotated[int, Spelled(",lanes=")] = LANES

    def __post_init__(self) -> None:
        check_least(self, num_lanes=1)

    @property
    def promise(self) -> Promise:
        """Raster's distribution: the draws are others."""
        return "distribution"

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError for greedy decoding as well."""
        if conditions.temperature == 0:
            raise ValueError(f"{self} needs a temperature above 0: greedy decoding draws nothing")
        super().check(conditions)


@dataclass(frozen=True)
class CoupledJacobi(SpeculativeJacobi):
    """Speculative Jacobi decoding with a maximal coupling (arXiv:2510.24211)."""

    word = "mc-sjd"
    afresh = False
