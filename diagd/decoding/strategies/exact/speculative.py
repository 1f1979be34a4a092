"""Speculative Jacobi decoding: drafts verified by their probabilities; raster's distribution.

`sjd` (arXiv:2410.01699) keeps or replaces drafts and draws afresh what follows the first one
replaced; `mc-sjd` (arXiv:2510.24211) couples what follows, too, so drafts change as seldom as they
can.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import Lanes
from diagd.decoding.sampling import if_any_best, truncated_logits
from diagd.decoding.strategies.exact.drafts import Drafts
from diagd.decoding.strategies.exact.exact import LANES, check_least
from diagd.decoding.strategies.exact.rules import couple
from diagd.decoding.strategies.exact.verification import verify_frames
from diagd.decoding.strategies.strategy import Conditions, Promise, Spelled, Strategy
from diagd.decoding.stream import Stream
from diagd.decoding.workspace import Step


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

    def decode(self, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
        """Verify the drafts that follow the prefix, by coupling."""
        drafts = Drafts(layout, stream.batch_size, self.num_lanes, lag=0)
        return verify_frames(stream, layout, drafts, _Coupling(stream, self.afresh))


@dataclass(frozen=True)
class CoupledJacobi(SpeculativeJacobi):
    """Speculative Jacobi decoding with a maximal coupling (arXiv:2510.24211)."""

    word = "mc-sjd"
    afresh = False


class _Coupling:
    """The rule; it remembers what drafts were drawn from."""

    def __init__(self, stream: Stream, afresh: bool) -> None:
        self.afresh = afresh
        shape = *stream.tokens.shape, stream.ranges.high - stream.ranges.low
        self.sources = torch.zeros(shape, device=stream.tokens.device)  # (B, slots, V)

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, space = step.ranges.low, step.space
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        drafts = space.tokens[:, lane.outputs] - low
        target, source = scores.softmax(-1), self.sources[:, lane.outputs]
        self.sources.index_copy_(1, lane.outputs, target)
        drawn = couple(target, source, drafts, space.seeds, lane, self.afresh) + low
        return if_any_best(drawn, scores.amax(-1))
