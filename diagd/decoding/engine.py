"""The engine: a batch of sequences in one memory, and the streams that write them.

A `Batch` is memory and one operation: run the lanes requested by its streams in one forward pass. A
`Stream` writes a sequence, frame after frame, each frame by any strategy, which requests its lanes
step by step; streams are added and removed independently. A guided stream has a sequence for each
of its prompts.

When the context is full, a new frame overwrites the slots of the oldest, and nothing is recomputed:
the slots after the prompt's prefix (everything before the first context frame) are a ring, and keys
and values stay as computed. If the model depends on absolute positions, or `keep_frames` is given,
the prefix and the newest frames are prefilled again from slot 0 instead.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import Buffers, CausalModel, Drawing, check_ids
from diagd.decoding.sampling import UNDRAWN, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import (
    SCRATCH,
    STAND_IN,
    FrameFormat,
    Order,
    Section,
    SequenceLayout,
    check_learnt,
    make_plan,
)
from diagd.decoding.step import Lanes, StepQueue, side_by_side, tensors_of
from diagd.decoding.visibility import NEVER, Rule, Seen, raster_rule
from diagd.threads import follow_free_cores

# Lanes of a prompt fed at once: on the CPU as many as its caches hold, on a GPU enough to keep it
# busy while the host launches the next layer.
PREFILL_LANES = {"cpu": 256, "cuda": 4096}


class NextStep(NamedTuple):
    """A request of a strategy: the lanes of one step of its stream's sequences."""

    lanes: Tensor  # (8 or 11, sequences, L) int64, padding at the end
    num_fed: int  # lanes of a sequence that are not padding
    end: int  # one past the last position that they may see
    num_whole: int  # frames of the layout that are complete before it runs


class Batch:
    """Memory for sequences of one model, and one operation: run the steps of their streams.

    Args:
        model: model to decode with (see `CausalModel`).
        num_sequences: videos at once; a guided one needs a sequence for each of its prompts.
        num_slots: tokens held per sequence, including one scratch slot.
        context: (1 or num_sequences, M, size) cross-attention input, for models that have one.
        rule: which lane sees which token (see `diagd.decoding.visibility`).

    Attributes:
        num_steps: forward passes so far, without those of prompts.
    """

    def __init__(
        self,
        model: CausalModel,
        num_sequences: int,
        num_slots: int,
        context: Tensor | None = None,
        rule: Rule = raster_rule,
    ) -> None:
        self.model, self.rule, self.num_sequences = model, rule, num_sequences
        # a learnt stand-in's id is in a slot of its own, which is never visible, as scratch
        num_kept = int(model.shape.stand_in is not None)
        buffers = model.make_buffers(num_sequences, num_slots + num_kept, context)
        self.scratch, self.device = buffers.held.shape[1] - 1, buffers.held.device
        self.num_usable = self.scratch - num_kept
        self._steps = StepQueue(model, buffers, rule)
        # weak references, as streams hold the batch: a dropped stream is closed
        self._streams: list[weakref.ref[Stream]] = []
        self._busy: list[Stream] = []  # streams that read or write
        self.num_steps = 0
        blank = torch.zeros(8, 1, 1, dtype=torch.int64, device=self.device)
        turned = model.coordinates(blank[0])
        self._blank = blank if turned is None else torch.cat([blank, turned])
        lane = Lanes.of(self._blank)
        for field in (lane.slots, lane.inputs, lane.outputs):
            field.fill_(self.scratch)

    @property
    def buffers(self) -> Buffers:
        """The memory, once all steps so far have run (on a GPU: are in its queue)."""
        return self._steps.buffers

    @property
    def streams(self) -> "list[Stream]":
        """Streams that were admitted and not closed, by their sequences."""
        return [one for ref in self._streams if (one := ref()) is not None]

    def free_place(self, count: int) -> int | None:
        """Return the first of so many free sequences in a row; None if there are none."""
        first = 0
        for stream in self.streams:
            if stream.first - first >= count:
                break
            first = stream.end
        return first if first + count <= self.num_sequences else None

    def admit(
        self,
        frame: FrameFormat,
        sampling: SamplingOptions | None = None,
        seed: int = 0,
        *,
        model: CausalModel | None = None,
        max_slots: int | None = None,
        keep_frames: int | None = None,
    ) -> "Stream":
        """Assign the first free sequences to a stream, a neighbour for each guidance scale.

        The stream must be prefilled next. `model` is the batch's, guided in the stream's own way;
        the other arguments are those of `DecodingEngine`. ValueError if the batch is full.
        """
        model = model or self.model
        needed = 1 + len(model.scales)
        if (first := self.free_place(needed)) is None:
            taken = sum(stream.num_sequences for stream in self.streams)
            raise ValueError(
                f"batch is full: expected {needed} free sequences in a row, "
                f"{taken} of {self.num_sequences} are in use"
            )
        longest = min(self.num_usable - frame.num_action_tokens, model.max_positions)
        max_slots = longest if max_slots is None else min(max_slots, longest)
        stream = Stream(self, model, first, frame, max_slots, keep_frames)
        stream.forget()
        self.buffers.seeds[first : first + needed] = seed
        streams = sorted([*self.streams, stream], key=lambda one: one.first)
        self._streams = [weakref.ref(one) for one in streams]
        stream.set_sampling(sampling or SamplingOptions())
        return stream

    def remove(self, stream: "Stream") -> None:
        if stream not in self.streams:
            raise ValueError("stream is closed already")
        stream.stop()
        stream.forget()
        self.attend_to(stream, False)
        self._streams.remove(weakref.ref(stream))

    def renew_step(self) -> None:
        """Rebuild the step after sampling options have changed."""
        self._steps.draw_by(self._drawings())

    def run(self, asking: Sequence[tuple["Stream", NextStep]]) -> None:
        """Run steps of different streams in one forward pass, and write the sampled tokens.

        It may wait for those after it, until `buffers` are read: see `StepQueue`.
        """
        first, lanes = asking[0][0].first, asking[0][1].lanes
        if len(asking) > 1:
            lanes = side_by_side([(one.first, step.lanes) for one, step in asking], self._blank)
        num_slots = min(max(step.end for _, step in asking), self.scratch)
        self._steps.add(lanes, num_slots, first)

    def _drawings(self) -> tuple[Drawing, ...]:
        """List how sequences are sampled; a free one like the one before it, without guidance."""
        streams = self.streams
        of_each = [replace(streams[0].drawing, num_sequences=1, scales=())] * self.num_sequences
        for stream in streams:
            one = replace(stream.drawing, num_sequences=1)
            end = stream.first + stream.num_sequences
            of_each[stream.first : end] = [one] * stream.num_sequences
            of_each[end:] = [replace(one, scales=())] * (self.num_sequences - end)
        runs = ((kind, len(list(run))) for kind, run in groupby(of_each))
        return tuple(replace(kind, num_sequences=count) for kind, count in runs)

    def step(self) -> None:
        """Feed a piece of each unread prompt, and run the next step of all other streams."""
        unread, asking = list[Stream](), list[tuple[Stream, NextStep]]()
        for stream in self._busy:
            if stream.num_unread:
                unread.append(stream)
            elif (step := stream.next_step or stream.resume()) is not None:
                asking.append((stream, step))
        if unread:
            self._read(unread)
        if asking:
            self.run(asking)
            self.num_steps += 1
            for stream, step in asking:
                stream.num_steps += 1
                stream.num_fed += step.num_fed
                stream.resume()

    def attend_to(self, stream: "Stream", is_busy: bool) -> None:
        """Include a stream in steps, or exclude it."""
        others = [one for one in self._busy if one is not stream]
        self._busy = sorted([*others, stream], key=lambda one: one.first) if is_busy else others

    @torch.inference_mode()
    def _read(self, reading: Sequence["Stream"]) -> None:
        """Feed a piece of each prompt to the cache, causally; neighbours in one forward pass."""
        if not self.model.replays:
            follow_free_cores()
        memory, device = self.buffers, self.device
        max_lanes = PREFILL_LANES.get(device.type, PREFILL_LANES["cuda"])
        runs = list[list[Stream]]()
        for stream in reading:
            if not runs or runs[-1][-1].end != stream.first:
                runs.append([])
            runs[-1].append(stream)
        for run in runs:
            own = slice(run[0].first, run[-1].end)
            width = min(max_lanes, max(stream.num_unread for stream in run))
            each = [(one.num_read, one.num_prompt - 1 + by) for one in run for by in one.shifts]
            starts, lengths = torch.tensor(each, device=device).T[..., None]
            positions = starts + torch.arange(width, device=device)
            is_padding = positions >= lengths
            positions = positions.masked_fill(is_padding, 0)
            slots = positions.masked_fill(is_padding, self.scratch)
            reach = max(min(start + width, length) for start, length in each)
            state = memory.held[own, :reach], memory.fed_at[own, :reach]
            seen = Seen(positions, positions, *state, self.rule)
            fed = memory.tokens[own].gather(1, slots)
            parts = torch.split(positions, [one.num_sequences for one in run])
            rows = zip(run, parts, strict=True)
            turned = [turns for one, part in rows if (turns := one.coordinates(part)) is not None]
            told = {"coordinates": torch.cat(turned, 1)} if turned else {}
            given = fed, positions, slots, seen, memory.cache, 1, own.start
            self.model.forward(*given, **told)
            for stream in run:
                stream.num_read += width
                stream.num_unread = max(0, stream.num_unread - width)
                if not (stream.num_unread or stream.is_writing):
                    self.attend_to(stream, False)


class Stream:
    """The frames of one video, written into neighbouring sequences of a batch by strategies.

    A guided stream has a sequence for each of its prompts; `shifts` holds how much longer each
    prompt is than the first: positions and slots after it are shifted by as much.
    """

    def __init__(
        self,
        batch: Batch,
        model: CausalModel,
        first: int,
        frame: FrameFormat,
        max_slots: int,
        keep_frames: int | None,
    ) -> None:
        self.batch, self.model, self.first = batch, model, first
        self.scales, self.max_slots = model.scales, max_slots
        self.num_sequences = 1 + len(self.scales)
        self.end = first + self.num_sequences
        self._set_frame(frame)
        fit = (max_slots + frame.one.num_leading) // frame.one.slots_per_frame
        self.keep_frames = max(1, fit // 2) if keep_frames is None else keep_frames
        self.reads_again = keep_frames is not None or not self.model.relative_positions
        self.shifts = [0] * self.num_sequences
        self.by = self.held.new_zeros(self.num_sequences, 1)  # `shifts`, (sequences, 1)
        self.openings: Sequence[Tensor] = ()  # of each sequence, replacing its first tokens
        self.num_used = 0  # tokens of the sequence so far, including those that left
        # tokens of the prompt; of them fed; and to feed before step 0, which feeds the last one
        self.num_prompt = self.num_read = self.num_unread = 0
        self.num_prefix = 0  # slots before the first context frame
        # grids in the prompt, frames of earlier formats, and last those of the current one
        self.sections = [Section(0, frame)]
        self.num_held = 0  # visible frames
        self.window = 0  # frames that the context holds, including the current one
        self.num_generated = self.num_dropped_frames = 0  # frames since the prefill
        self.num_steps = self.num_fed = 0  # since the prefill, without padding
        self.verified: list[Any] = []  # `VerifiedStep`s since the last call of `decode`
        self._steps: Iterator[NextStep | None] = iter(())
        self.is_writing = False
        self.next_step: NextStep | None = None
        # frames laid out; of them complete, and returned
        self.num_open = self.num_whole = self.num_taken = 0

    def _set_frame(self, frame: FrameFormat) -> None:
        self.frame, places = frame, (frame.one.token_slots, frame.one.action_slots)
        device = self.batch.device  # lists of indices would be copied to it each time
        self._visual, self._given = (
            torch.tensor(of, dtype=torch.int64, device=device) for of in places
        )

    def go_on_with(
        self,
        frame: FrameFormat,
        sampling: SamplingOptions | None = None,
        read_again: bool = False,
    ) -> None:
        """Continue with frames of another format; earlier frames become a prefix of them.

        Args:
            read_again: prefill the prefix again, causally as in training, in place of the keys and
                values that it was written with.

        Raises:
            ValueError: frames have left a full context: its window needs frames of one format.
        """
        if self.num_dropped_frames:
            raise ValueError("context is full: cannot continue with frames of another format")
        self.stop()
        *before, last = self.sections
        count = (self.num_used - last.start) // self.frame.one.slots_per_frame
        self.sections = [*before, last._replace(num_frames=count)] if count else before
        self._set_frame(frame)
        self.num_prefix, self.num_held = self.num_used, 0
        self.sections.append(Section(self.num_used, frame))
        self.max_slots = min(self.max_slots, self.batch.num_usable - frame.num_action_tokens)
        self.window = self.room()
        self.set_sampling(sampling or self.sampling)
        if read_again:
            ends = (self.num_used + by for by in self.shifts)
            self._prefill([row[:end].clone() for row, end in zip(self.tokens, ends, strict=True)])

    @property
    def before(self) -> FrameFormat | None:
        """The format of the frame right before the first one of the current format, if any."""
        found = (one.frame for one in self.sections[:-1] if one.end == self.sections[-1].start)
        return next(found, None)

    def coordinates(self, positions: Tensor) -> Tensor | None:
        """Return coordinates (3, sequences, n) of positions (sequences, n), if there are any."""
        each = [
            self.model.coordinates(row, [one.moved(by) for one in self.sections])
            for row, by in zip(positions, self.shifts, strict=True)
        ]
        turned = [one for one in each if one is not None]
        return torch.stack(turned, 1) if turned else None

    @property
    def tokens(self) -> Tensor:
        """(sequences, slots) int64, a view; reading it may wait for the device."""
        return self.batch.buffers.tokens[self.first : self.end]

    @property
    def held(self) -> Tensor:
        """(sequences, slots) int64, a view: the position in each slot, or -1."""
        return self.batch.buffers.held[self.first : self.end]

    @property
    def fed_at(self) -> Tensor:
        """(sequences, slots) int64, a view: the step at which each slot's true token is fed."""
        return self.batch.buffers.fed_at[self.first : self.end]

    @property
    def is_endless(self) -> bool:  # a new frame in a full context replaces the oldest
        return not self.reads_again and self.window > 1

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Change the sampling options from the next step on; compiled steps are rebuilt."""
        grid, model = self.frame.grid, self.model
        where = grid.height, grid.width, model.vocab_size, model.device
        self.sampling, self.ranges = sampling, ValidRanges.resolve(sampling.valid_range, *where)
        kind = replace(sampling, valid_range=None)
        self.drawing = Drawing(self.num_sequences, kind, self.ranges, self.scales)
        self.batch.renew_step()

    def close(self) -> None:
        """Release the sequences and hide their contents."""
        self.batch.remove(self)

    @torch.inference_mode()
    def forget(self) -> None:
        """Hide the contents of the sequences."""
        if (self.tokens == UNDRAWN).any():
            self._mend()
        self.held.fill_(-1)
        self.fed_at.fill_(NEVER)
        if (stand_in := self.model.shape.stand_in) is not None:
            self.tokens[:, self.batch.num_usable] = stand_in

    def _mend(self) -> None:
        """Overwrite NaN keys and values: masking multiplies them by 0, which is NaN elsewhere."""
        self.tokens.fill_(0)
        slots = torch.arange(self.tokens.shape[1], device=self.batch.device)
        for part in torch.split(slots, PREFILL_LANES["cpu"]):
            before, here = slots[: int(part[-1]) + 1], torch.zeros_like(part)
            seen = Seen.of_mask(part[:, None] == before, here, torch.zeros_like(before))
            fed = here.expand(self.num_sequences, -1)
            self.model.forward(fed, here, part, seen, self.batch.buffers.cache, 1, self.first)

    def prompts_of(
        self, prompt: Tensor, context_frames: int, row: int = 0, batch_size: int = 1
    ) -> list[Tensor]:
        """Return the prompts of a batch row's sequences; ValueError if one does not fit."""
        model, layout = self.model, self.frame.layout(1, context_frames, len(prompt) > 0)
        if len(prompt) < layout.context_slots:
            raise ValueError(
                f"context_frames={context_frames} need {layout.context_slots} tokens, "
                f"got a prompt of {len(prompt)}"
            )
        check_ids(prompt, model.num_embeddings, "prompt")
        each = model.prompts_of(prompt, row, batch_size)
        # unconditional prompts replace the actions of an empty prompt
        taken = layout.num_slots + (max(map(len, each)) if len(prompt) else 0)
        if taken > self.max_slots:
            raise ValueError(
                f"prompt and one frame need {taken} slots, the context holds {self.max_slots}"
            )
        return each

    def read(
        self, prompt: Tensor, context_frames: int = 1, sections: Sequence[Section] = ()
    ) -> None:
        """Restart from a prompt (P,) int64 that ends with frames; steps then read it.

        Args:
            sections: grids in the prompt before these frames, for models with coordinates.
        """
        self.prefill(self.prompts_of(prompt, context_frames), context_frames, sections)

    def prefill(
        self, prompts: Sequence[Tensor], context_frames: int = 1, sections: Sequence[Section] = ()
    ) -> None:
        """Restart from the result of `prompts_of`; steps then read it."""
        prompts = [prompt.to(self.batch.device) for prompt in prompts]
        self.num_prefix = len(prompts[0]) - self.frame.layout(1, context_frames, True).context_slots
        self.num_held = context_frames
        self.sections = [*sections, self.sections[-1]]
        self.num_generated = self.num_dropped_frames = self.num_steps = self.num_fed = 0
        self.stop()
        self.verified = []
        # if actions are the whole prompt, unconditional prompts replace them
        self.openings = () if len(prompts[0]) else prompts
        self._prefill(prompts if len(prompts[0]) else [one[:0] for one in prompts])

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Tensor]) -> None:
        self.forget()
        self.shifts = [len(prompt) - len(prompts[0]) for prompt in prompts]
        self.by = torch.tensor(self.shifts, device=self.batch.device)[:, None]
        self.num_used = self.num_prompt = len(prompts[0])
        start = self.num_used - self.num_held * self.frame.one.slots_per_frame
        self.sections[-1] = Section(start, self.frame)
        self.num_read, self.num_unread = 0, max(0, max(map(len, prompts)) - 1)
        if self.num_unread:
            self.batch.attend_to(self, True)
        for prompt, *state in zip(prompts, self.tokens, self.held, self.fed_at, strict=True):
            places = torch.arange(len(prompt), device=prompt.device)
            for row, values in zip(state, (prompt, places, places), strict=True):
                row[: len(prompt)] = values
        self.window = self.num_held + self.room()  # the first frame has no actions before it

    def room(self) -> int:
        free = self.max_slots - max(self.shifts) - self.num_used
        return max(0, free // self.frame.one.slots_per_frame)

    def drop_oldest(self) -> None:
        kept = min(self.keep_frames, self.num_held)
        newest = self.num_used - self.frame.layout(1, kept).context_slots
        self.num_dropped_frames += self.num_held - kept
        self.num_held = kept
        rows = zip(self.tokens, self.shifts, strict=True)
        spans = ((row, self.num_prefix + by, newest + by, self.num_used + by) for row, by in rows)
        self._prefill([torch.cat([row[:prefix], row[new:end]]) for row, prefix, new, end in spans])

    def slots_at(self, positions: Tensor) -> Tensor:
        """Return the slots of positions (int64), both of the first sequence.

        The prefix is fixed, the rest is a ring. SCRATCH is the last slot, STAND_IN the one before.
        """
        behind = positions - self.num_prefix
        around = self.num_prefix + behind % max(1, self.window * self.frame.one.slots_per_frame)
        slots = torch.where(behind < 0, positions, around)
        return torch.where(positions <= STAND_IN, self.batch.scratch + SCRATCH - positions, slots)

    def slots_between(self, first: int, end: int) -> Tensor:
        return self.slots_at(torch.arange(first, end, device=self.batch.device))

    def write(self, slots: Tensor, ids: Tensor | int) -> None:
        """Write ids (n,) at slots (n,) of the first sequence, and at theirs in the others."""
        self._put(self.tokens, slots, ids)

    def feed_at(self, slots: Tensor, steps: Tensor | int) -> None:
        """Set the steps (n,) at which the tokens at slots (n,) are fed."""
        self._put(self.fed_at, slots, steps)

    @torch.inference_mode()
    def _put(self, rows: Tensor, slots: Tensor, values: Tensor | int) -> None:
        places = slots + self.by
        if self.num_sequences > 1:
            places = torch.where(slots == self.batch.scratch, slots, places)
        rows.scatter_(1, places, values if isinstance(values, int) else values.expand_as(places))

    @torch.inference_mode()
    def open(self, layout: SequenceLayout, actions: Tensor) -> None:
        """Lay out frames after the used slots, with known actions (T, n) and separators."""
        width, end = layout.grid.width, self.num_used + layout.num_slots
        positions = torch.arange(self.num_used, end, device=self.batch.device)
        slots = self.slots_at(positions)
        self.num_open, self.num_whole, self.num_taken = layout.grid.num_frames, 0, 0
        # in a ring the oldest frames come last, whatever their slots
        before = (self.held >= 0) & (self.held < self.num_used + self.by)
        self.fed_at.fill_(NEVER).masked_fill_(before, -1).scatter_(1, slots + self.by, NEVER)
        self.held.scatter_(1, slots + self.by, positions + self.by)
        frames = slots.view(-1, layout.slots_per_frame)
        if layout.num_action_tokens:
            self.write(frames[:, self._given].flatten(), actions.flatten())
        if not self.num_used:
            for tokens, own in zip(self.tokens, self.openings, strict=False):
                tokens[: len(own)] = own
        if (ids := self.ranges.row_ends) is not None:
            row_ends = frames[:, layout.token_slots[width - 1 :: width]]
            self.write(row_ends.flatten(), ids.expand_as(row_ends).flatten())

    def follow(self, order: Order, layout: SequenceLayout) -> Iterator[NextStep]:
        """Yield the steps that write the frames laid out, in an order."""
        check_learnt(order, self.model.shape.stand_in)
        plan = make_plan(order, layout, self.model.replays, self.ranges.row_ends is not None)
        packed, fed_at = tensors_of(plan)
        device, base, whole = self.batch.device, self.num_used, 0
        lanes = self.place(packed).to(device)
        self.feed_at(self.slots_between(base, base + len(fed_at)), fed_at.to(device))
        base += max(self.shifts)
        for step, (start, end) in enumerate(pairwise(plan.starts)):
            asked = lanes[:, :, start:end], plan.num_fed[step], base + plan.ends[step]
            yield NextStep(*asked, whole)
            while whole < len(plan.frame_ends) and step >= plan.frame_ends[whole]:
                whole += 1

    @torch.inference_mode()
    def place(self, lanes: Tensor) -> Tensor:
        """Map lanes (8, n), relative to a layout, to slots after those in use.

        Returns (8, sequences, n), or (11, sequences, n) with coordinates.
        """
        lanes = lanes[:, None].repeat(1, self.num_sequences, 1)
        lane, slots = Lanes.of(lanes), lanes[1:4]  # written slots, and read slots
        lane.positions.add_(self.num_used)
        lane.frames.add_(self.num_generated)
        is_apart = slots <= STAND_IN
        slots.copy_(self.slots_at(torch.where(is_apart, slots, slots + self.num_used)))
        if any(self.shifts):
            by = self.by.cpu()
            lane.positions.add_(by)
            slots.copy_(torch.where(is_apart, slots, slots + by))
        turned = self.coordinates(lane.positions)
        return lanes if turned is None else torch.cat([lanes, turned])

    def begin(self, steps: Iterator[NextStep | None]) -> None:
        """Start steps in the batch; None waits until a prompt is read or whole frames are taken."""
        self.stop()
        self.verified, self._steps, self.is_writing = [], steps, True
        self.batch.attend_to(self, True)

    def stop(self) -> None:
        """Discard unfinished frames, and those that were not taken."""
        self._steps, self.next_step, self.is_writing = iter(()), None, False
        self.num_open = self.num_whole = self.num_taken = 0
        self.batch.attend_to(self, self.num_unread > 0)

    def resume(self) -> NextStep | None:
        """Resume the strategy after its step; return the next one, if one can run now."""
        self.next_step = step = next(self._steps, None)
        if step is not None:
            self.num_whole = step.num_whole
        return step

    def take_frame(self) -> Tensor:
        """Count the next complete frame after the used slots; return it, (height, width).

        Raises:
            ValueError: a token could not be sampled; checked once per frame, as it waits for a GPU.
        """
        visual = self.frame_under_way()
        undrawn = visual == UNDRAWN
        if undrawn.any():
            row, column = divmod(int(undrawn.int().argmax()), self.frame.grid.width)
            keys = enumerate(getattr(self.batch.buffers.cache, "keys", ()))
            broken = next((layer for layer, of in keys if not of.isfinite().all()), None)
            raise ValueError(
                f"no token can be sampled at frame {self.num_generated}, row {row}, column {column}"
                f" (seen after step {self.num_steps}): the model produced NaN or infinite logits"
                + ("" if broken is None else f", first in layer {broken}")
            )
        self.num_used += self.frame.one.slots_per_frame
        self.num_taken += 1
        self.num_generated += 1
        self.num_dropped_frames += self.num_held == self.window
        self.num_held = min(self.num_held + 1, self.window)
        return visual

    def frame_under_way(self) -> Tensor:
        """Return the frame behind the slots in use, (height, width), part of which may be stale."""
        end = self.num_used + self.frame.one.slots_per_frame
        visual = self.tokens[0, self.slots_between(self.num_used, end)[self._visual]]
        return visual.view(self.frame.grid.height, self.frame.grid.width)
