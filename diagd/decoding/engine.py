"""The engine: a stream of tokens, its prefill, its ring of slots, and the loop over a plan.

A `Stream` outlives what drives it: frame after frame may be written by another strategy, each by
one operation, "feed these lanes". When the context is full, a frame that begins takes the slots of
the oldest, and nothing is read again: the slots behind the prompt's prefix (what stands before the
first context frame) are a ring, and keys and values stay as they were computed. Where absolute
positions matter to the model, or `keep_frames` says so, the prefix and the newest frames are
prefilled again from slot 0 instead.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import Buffers, CausalModel, Step, StepFunction
from diagd.decoding.sampling import UNDRAWN, Draw, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import SCRATCH, DecodePlan, Order, SequenceLayout, make_plan
from diagd.decoding.visibility import NEVER, Rule, visible_slots
from diagd.threads import follow_free_cores

# Lanes of a prompt fed at once: on the CPU what the caches of its cores hold, on a GPU what keeps
# it busy while the host launches the next layer.
PREFILL_LANES = {"cpu": 256, "cuda": 4096}
BLOCK = 64  # cache slots are read in whole blocks, so that few numbers of them occur


class Lanes(NamedTuple):
    """The lanes of one forward pass: each field (L,) int64, all of them a tensor (8, L)."""

    positions: Tensor  # where the lane stands: what it may see, and what RoPE sees
    slots: Tensor  # where its keys and values are written; scratch for padding
    inputs: Tensor  # the slot whose token id is fed: `slots`, or a stand-in's source
    outputs: Tensor  # the slot that its prediction is written to, or scratch
    steps: Tensor  # the step at which it is fed
    frames: Tensor  # frame, row and column of the token it writes (0 where it writes none)
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> "Lanes":
        """Name the rows of (8, L): views, so what is written to them is written to `packed`."""
        return cls(*packed.unbind())


def run_step(model: CausalModel, step: Step, lanes: Tensor, num_slots: int) -> None:
    """Gather, forward, sample, scatter: lanes (8, L), over so many slots in whole blocks."""
    lane, memory, num_slots = Lanes.of(lanes), step.buffers, whole_blocks(num_slots, BLOCK)
    seen = lane.positions, lane.steps, memory.held[:num_slots], memory.fed_at[:num_slots]
    visible = model.see(*seen) if step.is_plain else visible_slots(*seen, step.rule)
    # UNDRAWN is no id: it is found in `Stream.finish_frame`
    tokens = memory.tokens[:, lane.inputs].clamp_(min=0)
    logits = model.forward(tokens, lane.positions, lane.slots, visible, memory.cache)
    places = lane.frames, lane.rows, lane.columns
    draw = Draw(step.sampling, step.ranges, memory.seeds, *places)
    memory.tokens.index_copy_(1, lane.outputs, model.sample(logits, draw))


class NextStep(NamedTuple):
    """What a strategy asks for: the lanes of one step."""

    lanes: Tensor  # (8, L) int64, padding at the end
    num_fed: int  # of them that are no padding
    end: int  # one past the last position that they may see
    num_whole: int  # frames of the layout that are whole before it runs


def whole_blocks(size: int, block: int) -> int:
    return -(-size // block) * block


class Stream:
    """Tokens of a model, written by whoever feeds lanes; `frame` is the layout of one frame."""

    def __init__(
        self,
        model: CausalModel,
        frame: SequenceLayout,
        buffers: Buffers,
        max_slots: int,
        keep_frames: int | None,
        sampling: SamplingOptions | None,
        rule: Rule,
    ) -> None:
        self.model, self.frame, self.max_slots, self.rule = model, frame, max_slots, rule
        fit = (max_slots + frame.num_leading) // frame.slots_per_frame
        self.keep_frames = max(1, fit // 2) if keep_frames is None else keep_frames
        self.reads_again = keep_frames is not None or not model.relative_positions
        self.buffers, self.held, self.fed_at = buffers, buffers.held, buffers.fed_at
        self.seeds, self.cache = buffers.seeds, buffers.cache
        self.scratch = len(self.held) - 1
        self.set_sampling(sampling or SamplingOptions())
        self.num_used = 0  # tokens of the sequence so far, those that left included
        self.num_prefix = 0  # of them, slots before the first context frame
        self.num_held = 0  # frames that may be seen
        self.window = 0  # frames that the context holds, the one under way included
        self.num_generated = self.num_dropped_frames = 0  # frames since the prefill
        self.num_steps = self.num_fed = 0  # since the prefill; padding not counted
        self.verified: list[Any] = []  # `VerifiedStep`s since the newest call of `decode`

    @property
    def tokens(self) -> Tensor:
        """(B, slots) int64; a device may have to be waited for."""
        return self.buffers.tokens

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def is_endless(self) -> bool:  # a frame that begins in a full context takes the oldest's slots
        return not self.reads_again and self.window > 1

    def layout(
        self, num_frames: int, context_frames: int, has_prompt: bool = True
    ) -> SequenceLayout:
        grid = replace(self.frame.grid, num_frames=num_frames)
        return replace(self.frame, grid=grid, context_frames=context_frames, has_prompt=has_prompt)

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Draw otherwise from the next step on; what was compiled is made anew."""
        grid, model = self.frame.grid, self.model
        where = grid.height, grid.width, model.vocab_size, model.device
        self.sampling, self.ranges = sampling, ValidRanges.resolve(sampling.valid_range, *where)
        step = Step(self.buffers, sampling, self.ranges, self.rule)
        run: StepFunction = model.make_step(step) or partial(run_step, model, step)
        self.run = torch.inference_mode()(run)

    def prefill(self, prompt: Tensor, layout: SequenceLayout) -> None:
        """Start anew from a prompt (B, P); `layout` is of a frame behind it, with its context."""
        self.num_prefix = prompt.shape[1] - layout.context_slots
        self.num_held = layout.context_frames
        self.num_generated = self.num_dropped_frames = self.num_steps = self.num_fed = 0
        self.verified = []
        self._follow_free_cores()
        self._prefill(prompt.to(self.tokens.device))

    def _follow_free_cores(self) -> None:
        if not self.model.replays:  # which is compiled for a number of threads, or on a GPU
            follow_free_cores()

    @torch.inference_mode()
    def _prefill(self, sequence: Tensor) -> None:
        """Feed all but the last token of a sequence, causally; the last is fed at step 0."""
        length = sequence.shape[1]
        self.tokens[:, :length] = sequence
        self.held.fill_(-1)
        self.held[:length] = torch.arange(length, device=self.held.device)
        self.num_used = length
        self.window = self.num_held + self.room()  # no actions stand before the first of them
        count = PREFILL_LANES.get(sequence.device.type, PREFILL_LANES["cuda"])
        for start in range(0, length - 1, count):
            end = min(start + count, length - 1)
            slots = torch.arange(start, end, device=sequence.device)
            seen = torch.arange(end, device=sequence.device)
            visible = visible_slots(slots, slots, seen, seen, self.rule)
            fed = sequence[:, start:end]
            self.model.forward(fed, slots, slots, visible, self.cache, logits_to_keep=1)

    def room(self) -> int:
        return max(0, (self.max_slots - self.num_used) // self.frame.slots_per_frame)

    def drop_oldest(self) -> None:
        kept = min(self.keep_frames, self.num_held)
        newest = self.num_used - self.layout(1, kept).context_slots
        prefix, frames = self.tokens[:, : self.num_prefix], self.tokens[:, newest : self.num_used]
        self.num_dropped_frames += self.num_held - kept
        self.num_held = kept
        self._prefill(torch.cat([prefix, frames], dim=1))

    def slots_at(self, positions: Tensor) -> Tensor:
        """Return the slots of positions (int64): the prefix stays, the rest is a ring.

        SCRATCH stands at the scratch slot.
        """
        behind = positions - self.num_prefix
        around = self.num_prefix + behind % max(1, self.window * self.frame.slots_per_frame)
        slots = torch.where(behind < 0, positions, around)
        return torch.where(positions == SCRATCH, self.scratch, slots)

    def slots_between(self, first: int, end: int) -> Tensor:
        return self.slots_at(torch.arange(first, end, device=self.tokens.device))

    @torch.inference_mode()
    def open(self, layout: SequenceLayout, actions: Tensor) -> None:
        """Lay frames out behind the slots in use: actions (B, T, n) and separators are known."""
        width = layout.grid.width
        end = self.num_used + layout.num_slots
        slots = self.slots_between(self.num_used, end)
        self.held[slots] = torch.arange(self.num_used, end, device=slots.device)
        before = (self.held >= 0) & (self.held < self.num_used)
        self.fed_at.copy_(torch.where(before, -1, NEVER))
        frames = slots.view(-1, layout.slots_per_frame)
        self.tokens[:, frames[:, layout.action_slots]] = actions
        if self.ranges.row_ends is not None:
            self.tokens[:, frames[:, layout.token_slots[width - 1 :: width]]] = self.ranges.row_ends

    def follow(self, order: Order, layout: SequenceLayout) -> Iterator[NextStep]:
        """Ask for the steps that write the frames that were laid out in an order."""
        plan = make_plan(order, layout, self.model.replays, self.ranges.row_ends is not None)
        packed, fed_at = _tensors_of(plan)
        base, frame, lanes = self.num_used, 0, self.place(packed).to(self.tokens.device)
        slots = self.slots_between(base, base + len(fed_at))
        with torch.inference_mode():
            self.fed_at[slots] = fed_at.to(self.fed_at.device)
        for step, (start, end) in enumerate(pairwise(plan.starts)):
            yield NextStep(lanes[:, start:end], plan.num_fed[step], base + plan.ends[step], frame)
            while frame < len(plan.frame_ends) and step >= plan.frame_ends[frame]:
                frame += 1

    @torch.inference_mode()
    def place(self, lanes: Tensor) -> Tensor:
        """Put lanes (8, total), counted from the start of a layout, behind the slots in use."""
        lanes = lanes.clone()
        lane = Lanes.of(lanes)
        lane.positions.add_(self.num_used)
        for slots in (lane.slots, lane.inputs, lane.outputs):
            slots[slots != SCRATCH] += self.num_used
            slots.copy_(self.slots_at(slots))
        lane.frames.add_(self.num_generated)
        return lanes

    def write(self, steps: Iterable[NextStep], num_frames: int) -> Iterator[Tensor]:
        """Run the steps that a strategy asks for; yield each of its frames as it becomes whole."""
        done = 0
        for step in steps:
            while done < step.num_whole:
                yield self.finish_frame()
                done += 1
            self.feed(step)
        for _ in range(done, num_frames):
            yield self.finish_frame()

    def feed(self, step: NextStep) -> None:
        """Feed the lanes of a step, and write the tokens drawn from them."""
        self._follow_free_cores()
        self.run(step.lanes, min(step.end, self.scratch))
        self.num_steps += 1
        self.num_fed += step.num_fed

    def finish_frame(self) -> Tensor:
        """Count the frame behind the slots in use, which is whole; return it, (B, height, width).

        Raises:
            ValueError: a token could not be drawn; once a frame, a GPU is waited for to know.
        """
        grid, end = self.frame.grid, self.num_used + self.frame.slots_per_frame
        visual = self.tokens[:, self.slots_between(self.num_used, end)[self.frame.token_slots]]
        undrawn = (visual == UNDRAWN).any(0)
        if undrawn.any():
            row, column = divmod(int(undrawn.int().argmax()), grid.width)
            keys = enumerate(getattr(self.cache, "keys", ()))
            broken = next((layer for layer, of in keys if not of.isfinite().all()), None)
            raise ValueError(
                f"no token can be drawn at frame {self.num_generated}, row {row}, column {column} "
                f"(seen after step {self.num_steps}): the model's logits there are NaN or infinite"
                + ("" if broken is None else f", broken from layer {broken} on")
            )
        self.num_used = end
        self.num_generated += 1
        self.num_dropped_frames += self.num_held == self.window
        self.num_held = min(self.num_held + 1, self.window)
        return visual.view(-1, grid.height, grid.width)


@lru_cache(maxsize=64)
def _tensors_of(plan: DecodePlan) -> tuple[Tensor, Tensor]:
    return torch.tensor(plan.lanes).T.contiguous(), torch.tensor(plan.fed_at)
