"""The rule of who may see whom, for decoding, training and analysis alike.

A lane sees a cached token iff the token is not later in raster order and was fed no later than the
lane (the same step included). A stand-in is seen by itself only. Slots not yet written are never
seen: their `fed_at` is NEVER. In a full context a frame leaves when a new one begins, and what is
fed from that step on does not see it: in a stream, another frame holds its slots by then; in a
whole sequence, `leaves_at` says so.

No lane sees its own target, since a token is fed in a step after the one that writes it.
"""

from typing import NamedTuple

from torch import Tensor

NEVER = 2**31 - 1


class SlotRule(NamedTuple):
    """What the mask of a step follows from, beside the positions of its lanes.

    Attributes:
        steps: (L,) int64, the step at which each lane is fed.
        held: (M,) int64, the position that each slot holds.
        fed_at: (M,) int64, the step at which each slot's true token is fed.
    """

    steps: Tensor
    held: Tensor
    fed_at: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the mask: lanes and slots."""
        return self.steps.shape[0], self.held.shape[0]  # `len` of a tensor takes a microsecond


def visible_slots(positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Tensor:
    """Apply the rule to the lanes of one forward pass against the cache.

    A stand-in stands at a position whose true token is fed later, so the rule hides its slot from
    everybody; the last term shows it to the lane that stands there.

    Args:
        positions: (L,) int64, where each lane stands in raster order.
        steps: (L,) int64, the step at which each lane is fed.
        held: (M,) int64, the position that each slot holds.
        fed_at: (M,) int64, the step at which each slot's true token is fed.

    Returns:
        (L, M) bool, True = the lane may attend to the slot.
    """
    own = held == positions[:, None]
    earlier = held < positions[:, None]
    return own | (earlier & (fed_at <= steps[:, None]))


def sees(
    positions: Tensor,
    steps: Tensor,
    stand_in: Tensor,
    leaves_at: Tensor,
    q: Tensor,
    r: Tensor,
) -> Tensor:
    """Apply the rule to pairs of lanes of a whole sequence, stand-ins included.

    Args:
        positions: (N,) int64 raster positions of the lanes; a stand-in shares its position with the
            true token that is fed later.
        steps: (N,) int64, the step at which each lane is fed.
        stand_in: (N,) bool.
        leaves_at: (N,) int64, the first step whose lanes do not see the lane any more, or NEVER.
        q, r: int64 lane numbers that broadcast; q looks, r is looked at.

    Returns:
        bool of the shape that q and r broadcast to.
    """
    known = (steps[r] <= steps[q]) & (steps[q] < leaves_at[r]) & ~stand_in[r]
    return (q == r) | (known & (positions[r] <= positions[q]))
