"""The schedule frozen into tensors: for every step, which lanes stand where and write what.

A lane feeds one token. What a step needs of its lanes are eight integers each; the plan lists them
for all steps one after the other, so a step is a slice and holds no decision (arXiv:2503.14070,
section 3.2; who predicts whom: docs/glossary.md, "stand-in").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from diagd.decoding.schedule import DiagonalSchedule, RowStart, SequenceLayout

LEAST_WIDTH = 8  # of a padded step: the narrowest tile of a GPU's matrix units
SCRATCH = -(2**31)  # stands for the scratch slot, whose place only the engine knows


class Lanes(NamedTuple):
    """The lanes of one forward pass, each field (L,) int64."""

    positions: Tensor  # the slot at which the lane stands: what it may see, and what RoPE sees
    slots: Tensor  # where its keys and values are written: `positions`, or scratch for padding
    inputs: Tensor  # the slot whose token id is fed: `positions`, or a stand-in's source
    outputs: Tensor  # the slot that its prediction is written to, or scratch
    steps: Tensor  # the step at which it is fed
    frames: Tensor  # frame, row and column of the token it writes (0 where it writes none)
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> "Lanes":
        """Name the rows of (8, L): views, so what is written to them is written to `packed`."""
        return cls(*packed.unbind())


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """All steps of a schedule over a layout; slots are relative to the start of the generation.

    Attributes:
        lanes: (8, total) int64, the fields of `Lanes`, the steps one after the other. A step may
            be padded (see `padded_width`) by repeats of its first lane that write to scratch.
        starts: (num_steps + 1) where each step begins in `lanes`.
        num_fed: (num_steps) lanes of each step that are no padding.
        ends: (num_steps) one past the last slot that a step's lanes stand at.
        fed_at: (num_slots,) int64, the step at which each generated slot's true token is fed.
    """

    schedule: DiagonalSchedule
    lanes: Tensor
    starts: tuple[int, ...]
    num_fed: tuple[int, ...]
    ends: tuple[int, ...]
    fed_at: Tensor

    @property
    def num_steps(self) -> int:
        """Forward passes."""
        return len(self.ends)

    def frame_done(self, t: int) -> int:
        """Return the step after which frame t is whole."""
        grid = self.schedule.grid
        return self.schedule.step_of(t, grid.height - 1, grid.width - 1)


@lru_cache(maxsize=64)
def make_plan(
    schedule: DiagonalSchedule,
    layout: SequenceLayout,
    pad: bool = True,
    known_row_ends: bool = False,
) -> DecodePlan:
    """Turn a schedule into tensors.

    Args:
        pad: let steps have few different widths (see `padded_width`).
        known_row_ends: rows end in a separator; nothing has to stand in for what is known.
    """
    steps: list[list[tuple[int, ...]]] = [[] for _ in range(schedule.num_steps)]
    fed_at = [0] * layout.num_slots
    for step, position, source, target in feeds(schedule, layout, known_row_ends):
        if source == position >= 0:
            fed_at[position] = max(step, fed_at[position])  # a stand-in may be the token itself
        if step < schedule.num_steps:
            output = SCRATCH if target is None else layout.slot_of(*target)
            steps[step].append((position, position, source, output, step, *(target or (0, 0, 0))))
    widest = max(map(len, steps))
    columns: list[tuple[int, ...]] = []
    starts: list[int] = [0]
    ends: list[int] = []
    for lanes in steps:
        lanes.sort()
        ends.append(lanes[-1][0] + 1)
        padding = padded_width(len(lanes), widest) - len(lanes) if pad else 0
        position, _, source, _, *rest = lanes[0]
        columns += lanes + [(position, SCRATCH, source, SCRATCH, *rest)] * padding
        starts.append(len(columns))
    packed = torch.tensor(columns, dtype=torch.int64).T.contiguous()
    num_fed = tuple(map(len, steps))
    return DecodePlan(schedule, packed, tuple(starts), num_fed, tuple(ends), torch.tensor(fed_at))


def padded_width(num_lanes: int, widest: int | None = None) -> int:
    """Return to how many lanes a step is padded, so that a run has few shapes.

    One stays one. Others become a power of two from `LEAST_WIDTH` on, below which a GPU gains
    nothing, or as many as the widest step has, where that is known and little more.
    """
    if num_lanes == 1:
        return 1
    width = max(LEAST_WIDTH, 1 << (num_lanes - 1).bit_length())
    return width if widest is None or 4 * width <= 3 * widest else widest


def feeds(
    schedule: DiagonalSchedule,
    layout: SequenceLayout,
    known_row_ends: bool = False,
) -> Iterator[tuple[int, int, int, tuple[int, int, int] | None]]:
    """Yield (step, position, source slot, place written or None) of every lane, in no order.

    The token written last would be fed at step `num_steps`, which nobody runs.
    """
    grid, num_actions = schedule.grid, layout.num_action_tokens
    if layout.has_prompt:
        yield 0, -1, -1, None if num_actions else (0, 0, 0)
    for t in range(grid.num_frames):
        for slot in layout.action_slots(t):
            last = slot == layout.slot_of(t, 0, 0) - 1
            yield schedule.step_of(t, 0, 0), slot, slot, (t, 0, 0) if last else None
        for i in range(grid.height):
            for j in range(grid.width):
                slot, step = layout.slot_of(t, i, j), schedule.step_of(t, i, j)
                successor = _successor(layout, t, i, j)
                on_time = successor is not None and schedule.step_of(*successor) == step + 1
                yield step + 1, slot, slot, successor if on_time else None
                if successor is not None and not on_time:
                    source = slot
                    if not known_row_ends:
                        source = _stand_in(schedule, layout, *successor[:2])
                    yield schedule.step_of(*successor), slot, source, successor


def _successor(layout: SequenceLayout, t: int, i: int, j: int) -> tuple[int, int, int] | None:
    """Return the place whose raster predecessor is (t, i, j), unless an action stands between."""
    grid = layout.grid
    if j + 1 < grid.width:
        return t, i, j + 1
    if i + 1 < grid.height:
        return t, i + 1, 0
    if t + 1 < grid.num_frames and not layout.num_action_tokens:
        return t + 1, 0, 0
    return None


def _stand_in(schedule: DiagonalSchedule, layout: SequenceLayout, t: int, i: int) -> int:
    """Return the slot whose token id stands in for the unknown predecessor of (t, i, 0)."""
    grid, step, row_start = schedule.grid, schedule.step_of(t, i, 0), schedule.row_start
    if row_start == "action":
        if layout.num_action_tokens:
            return layout.slot_of(t, 0, 0) - 1
        row_start = "predecessor"
    frame, offset = divmod((t * grid.height + i) * grid.width - 1, grid.tokens_per_frame)
    candidates = {
        "predecessor": (frame - 1, *divmod(offset, grid.width)),
        "temporal": (t - 1, i, 0),
        "spatial": (
            (t, i - 1, schedule.row_lag - 1)
            if i
            else (t - 1, 0, min(schedule.frame_lag, grid.width) - 1)
        ),
    }
    policies = get_args(RowStart)
    for policy in policies[policies.index(row_start) :]:
        place = candidates[policy]
        known = place[0] < 0 or schedule.step_of(*place) < step
        if layout.holds_frame(place[0]) and known:
            return layout.slot_of(*place)
    raise AssertionError("the spatial stand-in is always known")
