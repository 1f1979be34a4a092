"""Where prompt, frames and conditioning tokens stand in the sequence.

Slots count the sequence in raster order: the prompt, then for every generated frame its
conditioning tokens (actions) and its visual tokens. Here they are relative to the start of the
generation, so one layout serves every stretch of a stream: slot 0 is the first one after the
prompt, slot -1 the prompt's last token. With that start added they are the positions that the model
is told; `Stream.slots_at` makes of these the indices in the token buffer and in the KV cache.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from diagd.decoding.schedule import TokenGrid

# Which token id stands in for a predecessor that is not known yet (see `Diagonal`)
RowStart = Literal["action", "predecessor", "temporal", "spatial"]


@dataclass(frozen=True)
class SequenceLayout:
    """Slots of a generation.

    Args:
        grid: the frames to generate.
        num_action_tokens: conditioning tokens before each generated frame.
        context_frames: whole frames that the prompt ends with, each but the first after its own
            conditioning tokens.
        has_prompt: whether anything stands before the first generated frame.
    """

    grid: TokenGrid
    num_action_tokens: int = 0
    context_frames: int = 0
    has_prompt: bool = True

    def __post_init__(self) -> None:
        for name in ("num_action_tokens", "context_frames"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.has_prompt and not self.num_action_tokens:
            raise ValueError("an empty prompt needs conditioning tokens before the first frame")

    @property
    def slots_per_frame(self) -> int:
        """Slots of a generated frame: its conditioning tokens and its visual tokens."""
        return self.num_action_tokens + self.grid.tokens_per_frame

    @property
    def num_slots(self) -> int:
        """Slots of the whole generation, the prompt not counted."""
        return self.grid.num_frames * self.slots_per_frame

    @property
    def context_slots(self) -> int:
        """Slots that the context frames take in the prompt."""
        tokens = self.context_frames * self.slots_per_frame
        return tokens - self.num_action_tokens if tokens else 0

    def action_slots(self, t: int) -> range:
        """Return the slots of the conditioning tokens of frame t."""
        return range(t * self.slots_per_frame, t * self.slots_per_frame + self.num_action_tokens)

    def slot_of(self, t: int, i: int, j: int) -> int:
        """Return the slot of a visual token; t < 0 counts back through the context frames."""
        start = t * self.slots_per_frame + self.num_action_tokens
        return start + i * self.grid.width + j

    def holds_frame(self, t: int) -> bool:
        """Whether frame t is part of the sequence (generated or context)."""
        return -self.context_frames <= t < self.grid.num_frames


def check_row_start(row_start: str) -> None:
    """Raise ValueError unless the name is a `RowStart`."""
    if row_start not in get_args(RowStart):
        raise ValueError(
            f"row_start must be one of {', '.join(get_args(RowStart))}, got {row_start!r}"
        )
