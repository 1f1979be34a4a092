"""The one formula: token (t, i, j) is written at step t * frame_lag + i * row_lag + j.

Diagonal Decoding (arXiv:2503.14070, section 3.2) calls row_lag k and frame_lag d. All tokens of one
step come from one forward pass. Raster order (next-token prediction) is the same formula with
row_lag = width and frame_lag = height * width. `make_plan` expands a schedule: for every step, the
lanes with their positions and outputs. Integers only; no torch.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple, Protocol, get_args

from diagd.checks import whole

RowStart = Literal["learnt", "action", "predecessor", "temporal", "spatial"]
Place = tuple[int, int, int]  # frame t, row i, column j
ENDLESS = 2**31  # frames of a section that may have more
MIN_WIDTH = 8  # of a padded step: the smallest tile of a GPU's matrix units
# placeholders for slots whose indices only the engine knows: scratch, and of a learnt stand-in's id
SCRATCH, STAND_IN = -(2**31), 1 - 2**31


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a video: num_frames of height (rows) by width (columns), at least 1 each."""

    num_frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("num_frames", "height", "width"):
            if whole(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def parse(cls, text: str) -> "TokenGrid":
        """Parse a text `TxHxW`, such as `3x40x64`; ValueError for another form."""
        if not (match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip(), flags=re.ASCII)):
            raise ValueError(f"grid must look like TxHxW (for example 3x40x64), got {text!r}")
        return cls(*map(int, match.groups()))

    @property
    def tokens_per_frame(self) -> int:
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        return self.num_frames * self.tokens_per_frame


class Order(Protocol):
    """The step of each token of a grid; `DiagonalSchedule` is the paper's."""

    @property
    def grid(self) -> TokenGrid: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def row_start(self) -> RowStart: ...
    def step_of(self, t: int, i: int, j: int) -> int: ...


@lru_cache(maxsize=16)
def steps_of_frame(order: Order) -> tuple[int, ...]:
    """Return the step that writes each token of an order's first frame, in raster order."""
    rows, columns = range(order.grid.height), range(order.grid.width)
    return tuple(order.step_of(0, i, j) for i in rows for j in columns)


@dataclass(frozen=True, init=False)
class DiagonalSchedule:
    """The step of each token of a grid; lags out of bounds are a ValueError.

    Args:
        row_lag: the paper's k, in [1, width]: columns by which a row is ahead of the next one.
        frame_lag: the paper's d, in [1, (height - 1) * row_lag + width]: steps by which a frame
            starts after the previous one. None is the upper bound: a frame is complete before
            the next one starts ("spatial only").
        row_start: the token that stands in for a predecessor that is not known yet: `temporal`
            (same place, previous frame), `predecessor` (the predecessor's place, previous
            frame), `spatial` (the newest token of the row above), `action` (the frame's last
            action token, which a model can be trained to read as "a row starts"), or `learnt`
            (an id of its own, of a model that was finetuned with one).
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
        """Next-token prediction of a grid: one token per step."""
        return cls(grid, row_lag=grid.width, frame_lag=grid.tokens_per_frame)

    @classmethod
    def spatial(cls, grid: TokenGrid, row_lag: int = 1) -> "DiagonalSchedule":
        """Diagonals of row_lag in each frame of the grid; frames are complete before the next."""
        return cls(grid, row_lag)

    @classmethod
    def overlapping(cls, grid: TokenGrid, row_lag: int = 1) -> "DiagonalSchedule":
        """Diagonals across all frames of a grid: frame_lag = row_lag * height, as in the paper."""
        return cls(grid, row_lag, frame_lag=row_lag * grid.height)

    @property
    def num_steps(self) -> int:
        """Forward passes for the whole video: the last token's step plus one."""
        grid = self.grid
        return 1 + self.step_of(grid.num_frames - 1, grid.height - 1, grid.width - 1)

    @property
    def speedup(self) -> float:
        """Average tokens per step: the reduction in steps over next-token prediction."""
        return self.grid.num_tokens / self.num_steps

    @property
    def max_lanes(self) -> int:
        """Maximum number of tokens written in one step."""
        places = SequenceLayout(self.grid).places.values()
        return max(Counter(self.step_of(*place) for place in places).values())

    def step_of(self, t: int, i: int, j: int) -> int:
        """Return the step that writes frame t, row i, column j."""
        return t * self.frame_lag + i * self.row_lag + j


@dataclass(frozen=True)
class FrameFormat:
    """Tokens of a frame, and the conditioning tokens of each generated frame.

    Args:
        height, width: its rows and columns of tokens.
        num_action_tokens: conditioning tokens, before the frame except for those in a seam.
        num_seam_tokens: the last ones of them, between the two halves of its rows, for frames
            made of the images of two cameras.
    """

    height: int
    width: int
    num_action_tokens: int = 0
    num_seam_tokens: int = 0
    one: "SequenceLayout" = field(init=False, compare=False, repr=False)  # of a single frame

    def __post_init__(self) -> None:
        vars(self)["one"] = self.layout(1)  # validates the numbers

    def layout(
        self,
        num_frames: int,
        context_frames: int = 0,
        has_prompt: bool = True,
        before: "FrameFormat | None" = None,
    ) -> "SequenceLayout":
        """Lay out `num_frames` frames after a prompt that ends with `context_frames`."""
        grid = TokenGrid(num_frames, self.height, self.width)
        given = context_frames, has_prompt, self.num_seam_tokens, before
        return SequenceLayout(grid, self.num_action_tokens, *given)

    @property
    def grid(self) -> TokenGrid:  # of one frame
        return self.one.grid


class Section(NamedTuple):
    """Frames of one format that stand in a sequence one behind the other.

    Args:
        start: position of the first one's action tokens, or where they would stand.
        frame: their format.
        num_frames: how many there are; ENDLESS while more may come.
    """

    start: int
    frame: FrameFormat
    num_frames: int = ENDLESS

    @property
    def end(self) -> int:  # the position behind it
        return self.start + self.num_frames * self.frame.one.slots_per_frame

    def moved(self, by: int) -> "Section":
        return self._replace(start=self.start + by)


@dataclass(frozen=True)
class SequenceLayout:
    """Slots of a generation, in raster order, counted from the first one after the prompt.

    The prompt's last token is at slot -1. For every generated frame follow its conditioning tokens
    (actions) and its visual tokens. Slots plus the start of the generation are the model's
    positions. For frames made of the images of two cameras, the last conditioning tokens are in a
    seam between the two halves of their rows.
    """

    grid: TokenGrid
    num_action_tokens: int = 0  # of each generated frame, before it except for those in the seam
    context_frames: int = 0  # at the end of the prompt, all but the first after their actions
    has_prompt: bool = True  # whether anything precedes the first generated frame
    num_seam_tokens: int = 0  # action tokens in the seam
    before: FrameFormat | None = None  # of the frame right before the context frames, if another

    def __post_init__(self) -> None:
        for name in ("num_action_tokens", "context_frames", "num_seam_tokens"):
            if whole(getattr(self, name), name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.num_leading < 0 or (self.num_seam_tokens and self.grid.height % 2):
            given = f"{self.num_seam_tokens} of {self.num_action_tokens}, {self.grid.height} rows"
            raise ValueError(f"num_seam_tokens must be action tokens of even rows, got {given}")
        if not self.has_prompt and not self.num_leading:
            raise ValueError("prompt must not be empty if no conditioning tokens precede the frame")

    @property
    def num_leading(self) -> int:
        """Conditioning tokens before a frame's first visual token."""
        return self.num_action_tokens - self.num_seam_tokens

    @property
    def slots_per_frame(self) -> int:
        return self.num_action_tokens + self.grid.tokens_per_frame

    @property
    def num_slots(self) -> int:
        return self.grid.num_frames * self.slots_per_frame

    @property
    def context_slots(self) -> int:
        """Slots of the context frames in the prompt."""
        tokens = self.context_frames * self.slots_per_frame
        return tokens - self.num_leading if tokens else 0

    @cached_property
    def token_slots(self) -> list[int]:
        """The slots of the visual tokens of frame 0, in raster order."""
        size, lead, seam = self.grid.tokens_per_frame, self.num_leading, self.num_seam_tokens
        return [lead + place + (seam if 2 * place >= size else 0) for place in range(size)]

    @cached_property
    def action_slots(self) -> list[int]:
        return sorted({*range(self.slots_per_frame)} - {*self.token_slots})

    def slot_of(self, t: int, i: int, j: int) -> int:
        """Return the slot of a visual token; t < 0 counts back through the context frames.

        In the frame before these, which is of another size, its place is scaled and rounded down.
        """
        if t < -self.context_frames and (frame := self.before) is not None:
            row, column = i * frame.height // self.grid.height, j * frame.width // self.grid.width
            first = -self.context_frames * self.slots_per_frame - frame.one.slots_per_frame
            return first + frame.one.slot_of(0, row, column)
        return t * self.slots_per_frame + self.token_slots[i * self.grid.width + j]

    @cached_property
    def places(self) -> dict[int, Place]:
        """The place of each slot that has a visual token."""
        grid = self.grid
        places = product(range(grid.num_frames), range(grid.height), range(grid.width))
        return {self.slot_of(*place): place for place in places}


class Feed(NamedTuple):
    """One lane: a token fed in a step, and the token predicted from it."""

    step: int
    position: int  # its slot: determines what it may see, and RoPE
    source: int  # the slot whose token id is fed: `position`, or that of a stand-in
    target: Place | None  # the place that it predicts


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """All steps of an order over a layout; slots are relative to the start of the generation."""

    order: Order
    # of all steps in sequence: the eight fields of `diagd.decoding.step.Lanes`
    lanes: list[tuple[int, ...]]
    starts: list[int]  # (num_steps + 1) start of each step in `lanes`
    num_fed: list[int]  # (num_steps) lanes of each step without padding
    ends: list[int]  # (num_steps) one past the last slot of a step's lanes
    fed_at: list[int]  # (num_slots) the step at which each generated slot's true token is fed
    frame_ends: list[int]  # (num_frames) the step after which each frame is complete

    def as_data(self) -> dict[str, Any]:
        """Return it in JSON's types, for engines that run its steps themselves.

        Slots count in raster order from the first one behind the prompt, whose last token is at -1
        and is fed in step 0. `steps` has of each step the `positions` where its lanes stand, the
        `inputs`, slots whose ids are fed there (elsewhere's, of what stands in; null of a learnt
        stand-in), and the `outputs`, slots to write what is drawn from them, or null. `fed_at` has
        the step at which the token of each slot is fed, the last one's after all of them.

        A lane sees itself, and of other tokens those that are fed no later than it and stand no
        later; nobody else sees what stands in.
        """
        steps = list[dict[str, list[int | None]]]()
        for start, count in zip(self.starts, self.num_fed, strict=False):
            lanes = self.lanes[start : start + count]
            rows = [
                [None if lane[field] <= STAND_IN else lane[field] for lane in lanes]
                for field in (0, 2, 3)
            ]
            steps.append(dict(zip(("positions", "inputs", "outputs"), rows, strict=True)))
        return {"steps": steps, "fed_at": self.fed_at}


@lru_cache(maxsize=64)
def make_plan(
    order: Order, layout: SequenceLayout, pad: bool = True, known_row_ends: bool = False
) -> DecodePlan:
    """Expand the steps of an order.

    Args:
        order: when each token is written, such as a `DiagonalSchedule`.
        layout: the frames, and what precedes them (see `FrameFormat.layout`).
        pad: pad steps to few widths, by repeats of their first lane that write to scratch.
        known_row_ends: rows end in a known separator, which needs no stand-in.
    """
    steps: list[list[tuple[int, ...]]] = [[] for _ in range(order.num_steps)]
    fed_at, frame_ends = [0] * layout.num_slots, [0] * layout.grid.num_frames
    for step, position, source, target in feeds(order, layout, known_row_ends):
        if source == position >= 0:
            fed_at[position] = max(step, fed_at[position])  # a stand-in may be the token itself
        if step < order.num_steps:
            output = SCRATCH if target is None else layout.slot_of(*target)
            steps[step].append((position, position, source, output, step, *(target or (0, 0, 0))))
        if target is not None:
            frame_ends[target[0]] = max(step, frame_ends[target[0]])
    widest = max(map(len, steps))
    plan = DecodePlan(order, [], [0], [len(step) for step in steps], [], fed_at, frame_ends)
    for step, lanes in enumerate(steps):
        if not lanes:
            raise ValueError(f"order must write tokens in every step, got none in step {step}")
        lanes.sort()
        plan.ends.append(lanes[-1][0] + 1)
        position, _, source, _, *rest = lanes[0]
        padding = padded_width(len(lanes), widest) - len(lanes) if pad else 0
        plan.lanes.extend(lanes + [(position, SCRATCH, source, SCRATCH, *rest)] * padding)
        plan.starts.append(len(plan.lanes))
    return plan


def padded_width(num_lanes: int, widest: int | None = None) -> int:
    """Return the number of lanes that a step is padded to, so that a run has few shapes.

    One stays one; others become a power of two, or the widest step's number if that is close.
    """
    if num_lanes == 1:
        return 1
    width = max(MIN_WIDTH, 1 << (num_lanes - 1).bit_length())
    return width if widest is None or 4 * width <= 3 * widest else widest


def feeds(order: Order, layout: SequenceLayout, known_row_ends: bool = False) -> Iterator[Feed]:
    """Yield every lane, in no particular order.

    A target is predicted from the lane at its raster predecessor, fed in the same step; if that is
    not known yet, another token stands in for it, and the predecessor is fed once it is known. The
    last token written would be fed at step `num_steps`, which is never run.
    """
    if layout.has_prompt:
        yield Feed(0, -1, -1, layout.places.get(0))
    step = order.num_steps
    for slot in reversed(range(layout.num_slots)):
        successor = layout.places.get(slot + 1)
        if slot not in layout.places:  # a conditioning token, fed with the one after it
            yield Feed(step, slot, slot, successor)
            continue
        step = order.step_of(*layout.places[slot])
        if successor is None or order.step_of(*successor) <= step:
            yield Feed(step + 1, slot, slot, None)
        if successor is not None:
            is_known = known_row_ends or step < order.step_of(*successor)
            source = slot if is_known else _stand_in(order, layout, *successor)
            yield Feed(order.step_of(*successor), slot, source, successor)


def _stand_in(order: Order, layout: SequenceLayout, t: int, i: int, j: int) -> int:
    """Return the slot whose token id stands in for the unknown predecessor of (t, i, j)."""
    grid, step, row_start = order.grid, order.step_of(t, i, j), order.row_start
    oldest = -layout.context_frames - (layout.before is not None)
    if row_start == "learnt":
        return STAND_IN
    if row_start == "action":
        if layout.num_leading:
            return layout.slot_of(t, 0, 0) - 1
        row_start = "predecessor"

    def is_known(place: Place) -> bool:
        return oldest <= place[0] and (place[0] < 0 or order.step_of(*place) < step)

    frame, offset = divmod((t * grid.height + i) * grid.width + j - 1, grid.tokens_per_frame)
    above = [(t, i - 1, column) if i else (t - 1, 0, column) for column in range(grid.width)]
    candidates = {
        "predecessor": [(frame - 1, *divmod(offset, grid.width))],
        "temporal": [(t - 1, i, j)],
        "spatial": above[::-1],
    }
    policies = get_args(RowStart)
    for policy in policies[policies.index(row_start) :]:
        for place in filter(is_known, candidates[policy]):
            return layout.slot_of(*place)
    raise ValueError(f"order writes {(t, i, j)} before any token that could stand in for it")


def check_learnt(order: Order, stand_in: int | None) -> None:
    """Raise ValueError for the row start `learnt` of a model without an id learnt for it."""
    if order.row_start == "learnt" and stand_in is None:
        raise ValueError(
            "row start learnt needs a model with a learnt stand-in: diagd finetune --stand-in "
            "trains one"
        )


def check_row_start(row_start: str) -> None:
    if row_start not in (known := get_args(RowStart)):
        raise ValueError(f"row_start must be one of {', '.join(known)}, got {row_start!r}")
