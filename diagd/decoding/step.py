"""The step: gather, forward, sample, scatter, over the lanes of each sequence.

A lane is one token fed in one forward pass: its position, and what is predicted from it. Models
that fuse, compile or capture steps write the same tokens.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import CausalModel, Step
from diagd.decoding.sampling import Draw
from diagd.decoding.schedule import DecodePlan
from diagd.decoding.visibility import Seen

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
    tokens.scatter_(1, lane.outputs, _draw(model, step, lane, logits, first))


def _draw(model: CausalModel, step: Step, lane: Lanes, logits: Tensor, first: int) -> Tensor:
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
        draw = Draw(drawing.sampling, drawing.ranges, seeds, *places)
        ids = model.sample(steered(logits[own], drawing.scales), draw)
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
