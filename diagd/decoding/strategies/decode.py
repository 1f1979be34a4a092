"""Decoding by strategies without a schedule; one with a schedule is followed by the stream."""

from collections.abc import Iterator
from functools import singledispatch

from diagd.decoding.engine import Stream
from diagd.decoding.schedule import SequenceLayout
from diagd.decoding.strategies.exact import (
    Coupling,
    Drafts,
    KeepWithin,
    best_num_lanes,
    step_costs,
    verify_frames,
)
from diagd.decoding.strategies.table import (
    AdaptiveZipAR,
    Exact,
    Jacobi,
    SpeculativeJacobi,
    Strategy,
    Tolerant,
)
from diagd.decoding.strategies.zipar import AdaptiveFrame


@singledispatch
def decode(strategy: Strategy, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    """Write the frames of a layout behind the slots in use; yield as each becomes whole.

    The stream holds the actions already and hides what is not written (`Stream.open`). Between two
    frames it moves on (`Stream.num_used`) by the slots of the frame that is whole. A strategy is
    added by `@decode.register`.
    """
    raise ValueError(f"{strategy} has no schedule, and does not say how it decodes")


@decode.register
def _(strategy: AdaptiveZipAR, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    for _ in range(layout.grid.num_frames):
        AdaptiveFrame(stream, layout, strategy.window).write()
        yield


@decode.register
def _(strategy: Exact, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    num_lanes = strategy.num_lanes or best_num_lanes(step_costs(stream))
    lag, width = strategy.draft_lag, strategy.draft_width
    drafts = Drafts(layout, stream.batch_size, num_lanes, lag, width)
    return verify_frames(stream, layout, drafts)


@decode.register
def _(strategy: Jacobi, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    return decode(Exact(strategy.num_lanes, draft_lag=0), stream, layout)


@decode.register
def _(strategy: Tolerant, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    drafts = Drafts(layout, stream.batch_size, strategy.num_lanes, lag=None)
    rule = KeepWithin(strategy.tolerance) if strategy.tolerance > 1 else None
    return verify_frames(stream, layout, drafts, rule)


@decode.register
def _(strategy: SpeculativeJacobi, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    drafts = Drafts(layout, stream.batch_size, strategy.num_lanes, lag=0)
    return verify_frames(stream, layout, drafts, Coupling(stream, strategy.afresh))
