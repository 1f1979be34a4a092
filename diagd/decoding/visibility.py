"""The visibility rule, for decoding, training and analysis alike.

A lane sees a token iff the token was fed no later than the lane, the same step included (unwritten
tokens are fed at NEVER), and is not later in raster order. The latter is the `Rule`, an argument of
the engine. A lane sees itself, and a stand-in is seen by itself only. No lane sees its own target,
as a token is fed in a later step than the one that writes it.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

NEVER = 2**31 - 1
EVERYTHING = 2**62  # positions
# (position and step of lanes, position and step of tokens) -> bool; broadcasts
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def raster_rule(position: Tensor, step: Tensor, other: Tensor, fed_at: Tensor) -> Tensor:
    """The paper's rule: a token is not later in raster order."""
    return other <= position


def visible(
    position: Tensor,
    step: Tensor,
    other: Tensor,
    fed_at: Tensor,
    is_self: Tensor,
    rule: Rule = raster_rule,
) -> Tensor:
    """Return which lanes see which tokens, by position and step of each; broadcasts."""
    return is_self | (fed_at <= step) & rule(position, step, other, fed_at)


class Seen(NamedTuple):
    """Visibility in a forward pass: the lanes of S sequences, each over its own M slots.

    The slot of a stand-in, whose true token is fed later, is therefore hidden from all but the lane
    at that position. Fields without the sequence dimension apply to all sequences.
    """

    positions: Tensor  # (S, L) int64, of the lanes
    steps: Tensor  # (S, L) int64, at which they are fed
    held: Tensor  # (S, M) int64, the position that each slot holds, or -1
    fed_at: Tensor  # (S, M) int64, the step at which its true token is fed
    rule: Rule = raster_rule
    window: int = EVERYTHING  # maximum number of positions that a lane sees, its own included
    given: Tensor | None = None  # (S, L, M) bool, replaces steps and rule

    @classmethod
    def of_mask(cls, given: Tensor, positions: Tensor, held: Tensor) -> "Seen":
        """Make visibility from a mask (S, L, M), true where a lane may attend to a slot."""
        return cls(positions, positions, held, held, given=given)

    @property
    def shape(self) -> tuple[int, int]:  # lanes and slots; `len` of a tensor takes a microsecond
        return self.positions.shape[-1], self.held.shape[-1]

    @property
    def is_plain(self) -> bool:  # supported by kernels without a mask
        return self.given is None and self.rule is raster_rule

    def within(self, window: int) -> "Seen":
        return self._replace(window=window)

    def mask(self) -> Tensor:
        """Return (S, L, M) bool, or (L, M) for all sequences; true where a lane sees a slot."""
        at, held = self.positions[..., None], self.held[..., None, :]
        if self.given is not None:
            shown = self.given
        else:
            fed_at, steps = self.fed_at[..., None, :], self.steps[..., None]
            shown = visible(at, steps, held, fed_at, held == at, self.rule)
        return shown if self.window == EVERYTHING else shown & (at - held < self.window)
