"""Strategies that verify drafts by the noise of their place: raster's tokens in fewer steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import Lanes
from diagd.decoding.sampling import gumbel_noise, if_any_best, truncated_logits
from diagd.decoding.strategies.exact.costs import best_num_lanes
from diagd.decoding.strategies.exact.drafts import Drafts
from diagd.decoding.strategies.exact.rules import keep_within
from diagd.decoding.strategies.exact.verification import step_costs, verify_frames
from diagd.decoding.strategies.strategy import Promise, Spelled, Strategy
from diagd.decoding.stream import Stream
from diagd.decoding.workspace import Step

LANES = 32  # where what is written depends on the lanes, so that it does not on the machine


def check_least(strategy: Any, **least: int) -> None:
    """Raise ValueError where a number of a strategy is given and below the least it may be."""
    for name, bound in least.items():
        value = getattr(strategy, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


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

    def decode(self, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
        """Verify drafts that run ahead along a diagonal."""
        num_lanes = self.num_lanes or best_num_lanes(step_costs(stream))
        drafts = Drafts(layout, stream.batch_size, num_lanes, self.draft_lag, self.draft_width)
        return verify_frames(stream, layout, drafts)


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

    def decode(self, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
        """Verify the drafts that follow the prefix."""
        return Exact(self.num_lanes, draft_lag=0).decode(stream, layout)


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

    def decode(self, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
        """Verify drafts that run ahead, and keep those within the tolerance."""
        drafts = Drafts(layout, stream.batch_size, self.num_lanes, lag=None)
        rule = _KeepWithin(self.tolerance) if self.tolerance > 1 else None
        return verify_frames(stream, layout, drafts, rule)


@dataclass(frozen=True)
class _KeepWithin:
    """The rule of `Tolerant`."""

    tolerance: float

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, high = step.ranges.low, step.ranges.high
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        if step.sampling.temperature > 0:
            places = lane.frames, lane.rows, lane.columns
            scores = scores + gumbel_noise(step.space.seeds, *places, low, high)
        drafts = step.space.tokens[:, lane.outputs] - low
        return if_any_best(keep_within(scores, drafts, self.tolerance) + low, scores.amax(-1))
