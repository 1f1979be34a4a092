"""The one formula: token (t, i, j) is written at step t * frame_lag + i * row_lag + j.

Diagonal Decoding (arXiv:2503.14070, section 3.2) calls row_lag k and frame_lag d. All tokens of one
step come from one forward pass. Raster order (next-token prediction) is the same formula with
row_lag = width and frame_lag = height * width. Integers only; nothing here knows torch.

A row start knows little of the row above: row_lag tokens. More cannot be had for nothing: as long
as a row writes one token a step, each after the one on its left, what its start knows of the row
above is its lag behind that row, the lags of all rows add up, and a lag of L takes
(height - 1) * L + width steps, which is row_lag = L.
"""

import operator
import re
from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

RowStart = Literal["action", "predecessor", "temporal", "spatial"]


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a video: a grid of (frame t, row i, column j).

    Attributes:
        num_frames: frames to generate, at least 1.
        height: token rows of a frame, at least 1.
        width: token columns of a frame, at least 1.

    Raises:
        ValueError: a size below 1, or no whole number.
    """

    num_frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("num_frames", "height", "width"):
            if whole(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def parse(cls, text: str) -> "TokenGrid":
        """Read a text `TxHxW`, such as `3x40x64`, or raise ValueError."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip(), flags=re.ASCII)
        if not match:
            raise ValueError(f"grid must look like TxHxW (for example 3x40x64), got {text!r}")
        return cls(*map(int, match.groups()))

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one frame."""
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole video."""
        return self.num_frames * self.tokens_per_frame


@dataclass(frozen=True, init=False)
class DiagonalSchedule:
    """When each token of a grid is written.

    Args:
        grid: the tokens to write.
        row_lag: the paper's k, in [1, width]: how many columns a row runs ahead of the next one.
        frame_lag: the paper's d, in [1, (height - 1) * row_lag + width]: how many steps a frame
            starts after the one before. None is the upper bound: a frame is whole before the next
            one begins ("spatial only").
        row_start: which token stands in for a predecessor that is not known yet: `temporal` (the
            same place a frame earlier), `predecessor` (the predecessor a frame earlier), `spatial`
            (the newest token of the row above), or `action` (the last action token of the frame,
            which a model can be trained to take for "a row starts").

    Raises:
        ValueError: a lag out of its bounds, or no whole number; an unknown row start.
    """

    grid: TokenGrid
    row_lag: int
    frame_lag: int
    row_start: RowStart

    def __init__(
        self,
        grid: TokenGrid,
        row_lag: int,
        frame_lag: int | None = None,
        row_start: RowStart = "temporal",
    ) -> None:
        if not 1 <= whole(row_lag, "row_lag") <= grid.width:
            raise ValueError(f"row_lag must be in [1, width={grid.width}], got {row_lag}")
        bound = (grid.height - 1) * row_lag + grid.width
        frame_lag = bound if frame_lag is None else frame_lag
        if not 1 <= whole(frame_lag, "frame_lag") <= bound:
            raise ValueError(
                f"frame_lag must be in [1, (height - 1) * row_lag + width={bound}], got {frame_lag}"
            )
        check_row_start(row_start)
        vars(self).update(grid=grid, row_lag=row_lag, frame_lag=frame_lag, row_start=row_start)

    @classmethod
    def raster(cls, grid: TokenGrid) -> "DiagonalSchedule":
        """Next-token prediction of a grid: one token a step."""
        return cls(grid, row_lag=grid.width, frame_lag=grid.tokens_per_frame)

    @classmethod
    def spatial(cls, grid: TokenGrid, row_lag: int = 1) -> "DiagonalSchedule":
        """Diagonals of row_lag within a frame of the grid; one is whole before the next starts."""
        return cls(grid, row_lag)

    @classmethod
    def overlapping(cls, grid: TokenGrid, row_lag: int = 1) -> "DiagonalSchedule":
        """Diagonals through all frames of a grid: frame_lag = row_lag * height, as in the paper."""
        return cls(grid, row_lag, frame_lag=row_lag * grid.height)

    @property
    def steps_per_frame(self) -> int:
        """Steps from a frame's first token to its last, both counted (the paper's s_spa)."""
        return (self.grid.height - 1) * self.row_lag + self.grid.width

    @property
    def num_steps(self) -> int:
        """Forward passes for the whole video."""
        return (self.grid.num_frames - 1) * self.frame_lag + self.steps_per_frame

    @property
    def speedup(self) -> float:
        """Tokens a step on average: the cut in steps against next-token prediction."""
        return self.grid.num_tokens / self.num_steps

    @property
    def max_lanes(self) -> int:
        """The most tokens written in one step."""
        starts = [0] * (self.num_steps + 1)
        for t in range(self.grid.num_frames):
            for i in range(self.grid.height):
                first = self.step_of(t, i, 0)
                starts[first] += 1
                starts[first + self.grid.width] -= 1
        widest = lanes = 0
        for change in starts:
            lanes += change
            widest = max(widest, lanes)
        return widest

    def step_of(self, t: int, i: int, j: int) -> int:
        """Return the step that writes frame t, row i, column j."""
        return t * self.frame_lag + i * self.row_lag + j


def whole(value: SupportsIndex, name: str) -> int:
    """Return a whole number as an int, or raise ValueError."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


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
