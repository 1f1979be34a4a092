"""The step: gather, forward, sample, scatter, over the lanes of each sequence; and a queue of them.

A lane is one token fed in one forward pass: its position, and what is predicted from it. Models
that fuse, compile or capture steps write the same tokens.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import Buffers, CausalModel, Drawing, Step, StepFunction
from diagd.decoding.sampling import Draw
from diagd.decoding.schedule import DecodePlan
from diagd.decoding.visibility import Rule, Seen
from diagd.threads import follow_free_cores

BLOCK = 64  # cache slots are read in whole blocks, to have few different sizes


class Lanes(NamedTuple):
    """The lanes of a forward pass: each field (S', L) int64, stacked (8, S', L) or (11, S', L)."""

    positions: Tensor  # position of the lane: determines what it may see
    slots: Tensor  # slot of its keys and values; scratch for padding
    inputs: Tensor  # slot whose token id is fed: `slots`, or a stand-in's source
    outputs: Tensor  # slot that its prediction is written to, or scratch
    steps: Tensor  # step at which it is fed
    frames: Tensor  # frame, row and column of the token it writes (0 if none)
    rows: Tensor
    columns: Tensor
    coordinates: Tensor | None = None  # (3, S', L), for models that have some (see `CausalModel`)

    @classmethod
    def of(cls, packed: Tensor) -> "Lanes":
        """Name the rows of (8 or 11, ...) as views: writes to them are writes to `packed`."""
        return cls(*packed[:8].unbind(), coordinates=packed[8:] if len(packed) > 8 else None)


@lru_cache(maxsize=64)
def tensors_of(plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Return a plan's lanes (8, n) and `fed_at` as int64 tensors, relative to its layout."""
    return torch.tensor(plan.lanes).T.contiguous(), torch.tensor(plan.fed_at)


def run_step(model: CausalModel, step: Step, lanes: Tensor, num_slots: int, first: int = 0) -> None:
    """Gather, forward, sample, scatter: lanes (8, S', L), over `num_slots` in whole blocks."""
    lane, memory, reach = Lanes.of(lanes), step.buffers, whole_blocks(num_slots, BLOCK)
    own = slice(first, first + lanes.shape[1])
    held, fed_at = memory.held[own, :reach], memory.fed_at[own, :reach]
    seen = Seen(lane.positions, lane.steps, held, fed_at, step.rule)
    tokens = memory.tokens[own]
    # UNDRAWN is not an id: `Stream.take_frame` detects it
    fed = tokens.gather(1, lane.inputs).clamp_(min=0)
    told = {} if lane.coordinates is None else {"coordinates": lane.coordinates}
    logits = model.forward(fed, lane.positions, lane.slots, seen, memory.cache, 0, first, **told)
    tokens.scatter_(1, lane.outputs, draw(model, step, lane, logits, first))


def run_steps(
    model: CausalModel, step: Step, steps: Sequence[Tensor], num_slots: int, first: int = 0
) -> None:
    """Run steps one by one (see `StepFunction`)."""
    for lanes in steps:
        run_step(model, step, lanes, num_slots, first)


def side_by_side(steps: Sequence[tuple[int, Tensor]], blank: Tensor) -> Tensor:
    """Pad the lanes of steps to one width, also those of idle sequences between them.

    Args:
        steps: the first sequence of each, in order, and its lanes.
        blank: the lane (8 or 11, 1, 1) of a padding.
    """
    width, (end, _) = max(lanes.shape[2] for _, lanes in steps), steps[0]
    parts = list[Tensor]()
    for first, lanes in steps:
        if first > end:
            parts.append(blank.expand(-1, first - end, width))
        end = first + lanes.shape[1]
        padding = blank.expand(-1, lanes.shape[1], width - lanes.shape[2])
        parts.append(torch.cat([lanes, padding], 2))
    return torch.cat(parts, 1)


class StepQueue:
    """The steps of a batch, which wait for each other until its memory is read.

    A model that takes several at once (`CausalModel.steps_at_once`) runs them in one call.
    """

    def __init__(self, model: CausalModel, buffers: Buffers, rule: Rule) -> None:
        self.model, self.rule, self._buffers = model, rule, buffers
        self._drawings: tuple[Drawing, ...] = ()
        self._run: StepFunction | None = None
        self._waiting: list[Tensor] = []  # lanes of each step
        self._num_slots = self._first = 0  # of all of them

    @property
    def buffers(self) -> Buffers:
        """The memory, once all steps so far have run (on a GPU: are in its queue)."""
        self.run()
        return self._buffers

    def draw_by(self, drawings: tuple[Drawing, ...]) -> None:
        """Sample in another way from the next step on."""
        self.run()
        self._drawings, self._run = drawings, None

    def add(self, lanes: Tensor, num_slots: int, first: int) -> None:
        """Run a step, now or with those after it (arguments of `run_step`)."""
        own = first, lanes.shape[1]
        if self._waiting and own != (self._first, self._waiting[0].shape[1]):
            self.run()
        self._first, self._num_slots = first, max(self._num_slots, num_slots)
        self._waiting.append(lanes)
        if len(self._waiting) >= self.model.steps_at_once:
            self.run()

    def run(self) -> None:
        """Run the steps that wait."""
        if not self._waiting:
            return
        steps, num_slots = self._waiting, self._num_slots
        self._waiting, self._num_slots = [], 0
        if self._run is None:
            step = Step(self._buffers, self._drawings, self.rule)
            run = self.model.make_step(step) or partial(run_steps, self.model, step)
            self._run = torch.inference_mode()(run)
        if not self.model.replays:  # compiled for a number of threads, or on a GPU
            follow_free_cores()
        self._run(steps, num_slots, self._first)


def draw(model: CausalModel, step: Step, lane: Lanes, logits: Tensor, first: int) -> Tensor:
    """Return the ids (S', L) sampled by sequences, each with its own options."""
    drawn: list[Tensor] = []  # torch.compile does not support `list[Tensor]()`
    begin, end, start = first, first + len(logits), 0
    for drawing in step.drawings:
        start, since = start + drawing.num_sequences, max(start, begin)
        if since >= min(start, end):
            continue
        own, stride = slice(since - begin, min(start, end) - begin), 1 + len(drawing.scales)
        seeds = step.buffers.seeds[since : min(start, end) : stride]
        # a generator would be kept by torch.compile, with everything it reads
        frames, rows, columns = lane.frames[own], lane.rows[own], lane.columns[own]
        places = frames[::stride], rows[::stride], columns[::stride]
        how = Draw(drawing.sampling, drawing.ranges, seeds, *places)
        ids = model.sample(steered(logits[own], drawing.scales), how)
        drawn.append(ids.repeat_interleave(stride, 0) if stride > 1 else ids)
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def steered(logits: Tensor, scales: tuple[float, ...]) -> Tensor:
    """Combine sequences' logits to the guided logits of streams (see `Drawing`)."""
    if not scales:
        return logits
    each = [logits[prompt :: 1 + len(scales)].float() for prompt in range(1 + len(scales))]
    combined = each[-1]
    for scale, more, less in reversed(list(zip(scales, each, each[1:], strict=False))):
        combined = combined + scale * (more - less)
    return combined


def whole_blocks(size: int, block: int) -> int:
    return -(-size // block) * block
