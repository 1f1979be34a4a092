"""The rule of who may see whom, for decoding, training and analysis alike.

A lane sees a token iff that was fed no later than the lane, the same step included (what is not
written yet is fed at NEVER), and is not later in raster order. The latter is the `Rule`, an
argument of the engine. A lane sees itself, and a stand-in is seen by itself only. No lane sees its
own target, since a token is fed in a step after the one that writes it.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NEVER = 2**31 - 1
EVERYTHING = 2**62  # positions
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


class Seen(NamedTuple):
    """Who sees whom in a forward pass: the lanes of S sequences, each over M slots of its own.

    So the slot of a stand-in, whose true token is fed later, is hidden from all but the lane that
    stands there. Fields without the dimension of sequences are those of all.
    """

    positions: Tensor  # (S, L) int64, of the lanes
    steps: Tensor  # (S, L) int64, at which they are fed
    held: Tensor  # (S, M) int64, the position that each slot holds, or -1
    fed_at: Tensor  # (S, M) int64, the step at which its true token is fed
    rule: Rule = raster_rule
    window: int = EVERYTHING  # positions that a lane sees at most, its own included
    given: Tensor | None = None  # (S, L, M) bool in place of steps and rule

    @classmethod
    def of_mask(cls, given: Tensor, positions: Tensor, held: Tensor) -> "Seen":
        """Let lanes see what a mask (S, L, M) shows, true where a lane may attend to a slot."""
        return cls(positions, positions, held, held, given=given)

    @property
    def shape(self) -> tuple[int, int]:  # lanes and slots; `len` of a tensor takes a microsecond
        return self.positions.shape[-1], self.held.shape[-1]

    @property
    def is_plain(self) -> bool:  # for which kernels may be written that read no mask
        return self.given is None and self.rule is raster_rule

    def within(self, window: int) -> "Seen":
        return self._replace(window=window)

    def mask(self) -> Tensor:
        """Return (S, L, M) bool, or (L, M) of all sequences; true where a lane sees a slot."""
        at, held = self.positions[..., None], self.held[..., None, :]
        if self.given is not None:
            shown = self.given
        else:
            fed_at, steps = self.fed_at[..., None, :], self.steps[..., None]
            shown = visible(at, steps, held, fed_at, held == at, self.rule)
        return shown if self.window == EVERYTHING else shown & (at - held < self.window)
