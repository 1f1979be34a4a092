"""The rule of who may see whom, for decoding, training and analysis alike.

A lane sees a token iff that was fed no later than the lane, the same step included (what is not
written yet is fed at NEVER), and is not later in raster order. The latter is the `Rule`, an
argument of the engine. A lane sees itself, and a stand-in is seen by itself only. No lane sees its
own target, since a token is fed in a step after the one that writes it.
"""

from collections.abc import Callable

from torch import Tensor

NEVER = 2**31 - 1
# (position and step of lanes, position and step of the tokens they look at) -> bool; it broadcasts
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def raster_rule(position: Tensor, step: Tensor, other: Tensor, fed_at: Tensor) -> Tensor:
    """The rule of the paper: a token is not later in raster order."""
    return other <= position


def visible(
    position: Tensor,
    step: Tensor,
    other: Tensor,
    fed_at: Tensor,
    is_self: Tensor,
    rule: Rule = raster_rule,
) -> Tensor:
    """Return which lanes see which tokens, by position and step of each; it broadcasts."""
    return is_self | (fed_at <= step) & rule(position, step, other, fed_at)


def visible_slots(
    positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor, rule: Rule = raster_rule
) -> Tensor:
    """Return the mask (L, M) of lanes against the cache, True = the lane may attend to the slot.

    Of lanes, positions and steps are (L,) int64; of slots, the position that each holds or -1, and
    the step at which its true token is fed, (M,) int64. So the slot of a stand-in, whose true token
    is fed later, is hidden from all but the lane that stands there.
    """
    column = positions[:, None]
    return visible(column, steps[:, None], held, fed_at, held == column, rule)
