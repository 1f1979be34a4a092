"""Generate a video's tokens: frame by frame, or in one call with statistics."""

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import torch
from torch import Tensor, int64

from diagd.checks import whole
from diagd.decoding.engine import Batch, NextStep, Stream
from diagd.decoding.model import CausalModel, check_ids
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import (
    DiagonalSchedule,
    FrameFormat,
    Section,
    SequenceLayout,
    TokenGrid,
)
from diagd.decoding.strategies import exact
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.decoding.visibility import Rule, raster_rule
from diagd.system import process_peak_bytes


@singledispatch
def decode(strategy: Strategy, stream: Stream, layout: SequenceLayout) -> Iterator[NextStep]:
    """Yield, step by step, the lanes that write a layout's frames after the used slots.

    A schedule is followed; strategies that choose lanes while decoding are added by
    `decode.register`. They resume when their step has run. The stream already holds the actions
    and hides slots that are not written (`Stream.open`).
    """
    return stream.follow(strategy.schedule(layout.grid), layout)


decode.register(exact.exact)


class DecodingEngine:
    """Streams of frames from a raster-order model, started by `prefill` and written by `decode`.

    Its batch rows are streams of one `Batch`, with prompts of any lengths, and write equally many
    frames. Arguments that do not match the model or each other are a ValueError, in methods too.

    Args:
        model, sampling, seed, context, rule: as in `generate_tokens`.
        frame: tokens per frame, and conditioning tokens of each generated frame.
        batch_size: videos decoded together.
        max_slots: maximum sequence length in tokens, at most the model's context (the default);
            one number, or one for each batch row.
        keep_frames: frames to prefill again when the context is full; default: none if only the
            distance between positions matters to the model, else half of what it holds.

    Attributes:
        batch: the memory, with the count of steps.
        streams: one for each batch row, driven by strategies, with counts of steps and frames.
    """

    def __init__(
        self,
        model: CausalModel,
        frame: FrameFormat,
        batch_size: int = 1,
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        *,
        context: Tensor | None = None,
        max_slots: int | Sequence[int] | None = None,
        keep_frames: int | None = None,
        rule: Rule = raster_rule,
    ) -> None:
        if keep_frames is not None and whole(keep_frames, "keep_frames") < 0:
            raise ValueError(f"keep_frames must be 0 or more, got {keep_frames}")
        seeds, scales = _check_seeds(seed, batch_size), model.scales
        longest = model.max_positions
        of_rows = max_slots if isinstance(max_slots, Sequence) else [max_slots] * batch_size
        holds = [longest if n is None else min(whole(n, "max_slots"), longest) for n in of_rows]
        rows, slots = batch_size * (1 + len(scales)), max(holds) + frame.num_action_tokens + 1
        if scales and context is not None and len(context) > 1:
            context = context.repeat_interleave(1 + len(scales), 0)
        self.batch = Batch(model, rows, slots, context, rule)
        admit = partial(self.batch.admit, frame, sampling, keep_frames=keep_frames)
        self.streams = [admit(n, max_slots=held) for n, held in zip(seeds, holds, strict=True)]
        # weak, as it holds the streams: a reference cycle would delay freeing the cache
        self._under_way: weakref.ref[Generator[Tensor, None, None]] | None = None

    @property
    def stream(self) -> Stream:
        """The first batch row's stream."""
        return self.streams[0]

    @property
    def capture_seconds(self) -> float:
        """Seconds since the prefill spent on capturing steps as CUDA graphs."""
        return self.batch.buffers.capture_seconds

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Change the sampling options for the next call of `decode`; none may be in progress."""
        under_way = self._under_way and self._under_way()
        if under_way is not None and getgeneratorstate(under_way) != GEN_CLOSED:
            raise ValueError("sampling cannot change while decoding: close the generator first")
        for stream in self.streams:
            stream.set_sampling(sampling)

    def prefill(
        self, prompt: Tensor | Sequence[Tensor], context_frames: int | Sequence[int] = 1
    ) -> None:
        """Restart the streams from prompts, discarding their contents and closing `decode`.

        Args:
            prompt: (B, P) int64, or B prompts (P,) of any lengths, each ending with the last token
                of its last context frame; P may be 0 if actions precede the first frame.
            context_frames: complete frames at its end, with the actions between them; one number,
                or one for each prompt.
        """
        model, batch_size, prompts = self.batch.model, len(self.streams), list(prompt)
        if len(prompts) != batch_size or any(
            one.ndim != 1 or one.dtype != int64 for one in prompts
        ):
            is_one = isinstance(prompt, Tensor)
            given = [prompt] if is_one else prompts
            shown = ", ".join(f"{one.dtype} of shape {tuple(one.shape)}" for one in given)
            raise ValueError(
                f"prompt must be int64 of shape (batch={batch_size}, P), or a list of (P,), "
                f"got {shown}"
            )
        is_number = not isinstance(context_frames, Sequence)
        counts = [context_frames] * batch_size if is_number else list(context_frames)
        if len(counts) != batch_size:
            raise ValueError(f"context_frames: expected {batch_size} numbers, got {len(counts)}")
        if is_number and isinstance(prompt, Tensor):
            model.check_prompt(prompt, counts[0])
        else:
            for one, count in zip(prompts, counts, strict=True):
                model.check_prompt(one[None], count)
        each = [
            stream.prompts_of(one, count, row, batch_size)
            for row, (stream, one, count) in enumerate(
                zip(self.streams, prompts, counts, strict=True)
            )
        ]
        self._close()
        self.batch.buffers.capture_seconds, self.batch.num_steps = 0.0, 0
        for stream, of_stream, count in zip(self.streams, each, counts, strict=True):
            stream.prefill(of_stream, count)
        while any(stream.num_unread for stream in self.streams):
            self.batch.step()

    def _close(self) -> None:
        under_way = self._under_way and self._under_way()
        if under_way is not None:
            under_way.close()

    def decode(
        self,
        strategy: Strategy | DiagonalSchedule | str,
        actions: Tensor | None = None,
        num_frames: int | None = None,
        on_step: Callable[[int], object] | None = None,
    ) -> Generator[Tensor, None, None]:
        """Generate frames, each yielded when its last token is final in all batch rows.

        Closing the generator early, as the next call of `decode` does, keeps the frames yielded so
        far and discards the current one. If the frames do not all fit into the context, the
        strategy runs over as many at a time as fit: over single frames, which cannot overlap, once
        the context is full.

        Args:
            strategy: decoding strategy, by name (see `diagd.decoding.strategies`) or as a value.
            actions: (B, T, num_action_tokens) int64; actions[:, t] precedes frame t. None if the
                model has none.
            num_frames: frames to generate; default: those of the schedule or the actions.
            on_step: called after each step with `batch.num_steps`.

        Returns:
            A generator of (B, height, width) int64.
        """
        stream, model = self.stream, self.batch.model
        if not stream.window:
            raise ValueError("prefill must be called before decode")
        if isinstance(strategy, DiagonalSchedule):
            num_frames = strategy.grid.num_frames if num_frames is None else num_frames
            grid = replace(stream.frame.grid, num_frames=num_frames)
            if strategy.grid != grid:
                raise ValueError(f"schedule must be for {grid}, got one for {strategy.grid}")
        elif num_frames is None:
            if actions is None or actions.ndim < 2:
                raise ValueError("num_frames must be given without actions")
            num_frames = actions.shape[1]
        shape = (len(self.streams), num_frames, stream.frame.num_action_tokens)
        actions = _check_actions(actions, shape, model.num_embeddings)
        strategy = as_strategy(strategy)
        strategy.check(stream.frame.grid)
        for one in self.streams:
            _check_room(one, num_frames)
        self._close()
        actions = actions.to(self.batch.device)
        for one, of_row in zip(self.streams, actions, strict=True):
            one.begin(_steps(one, strategy, of_row))
        frames = _frames(self.batch, self.streams, num_frames, on_step)
        self._under_way = weakref.ref(frames)
        return frames


def write_frames(stream: Stream, strategy: Strategy | str, actions: Tensor) -> None:
    """Start writing frames of a stream in the steps of its batch.

    `stream.take_frame` returns the complete ones in order: `num_whole` less `num_taken`.

    Args:
        stream: from `Batch.admit`, after `read` of its prompt.
        strategy: decoding strategy, by name (see `diagd.decoding.strategies`) or as a value.
        actions: (T, n) int64, the n >= 0 conditioning tokens before each of T frames.

    Raises:
        ValueError: a strategy or actions that do not fit the stream.
    """
    strategy = as_strategy(strategy)
    strategy.check(stream.frame.grid)
    check_ids(actions, stream.model.num_embeddings, "actions")
    begin_frames(stream, strategy, actions)


def begin_frames(stream: Stream, strategy: Strategy, actions: Tensor) -> None:
    """Do as `write_frames` where strategy and actions were checked before they came in."""
    _check_room(stream, len(actions))
    stream.begin(_steps(stream, strategy, actions.to(stream.batch.device)))


def _frames(
    batch: Batch, streams: list[Stream], count: int, on_step: Callable[[int], object] | None
) -> Generator[Tensor, None, None]:
    try:
        for _ in range(count):
            while not min([stream.num_whole - stream.num_taken for stream in streams]):
                batch.step()
                if on_step is not None:
                    on_step(batch.num_steps)
            yield torch.stack([stream.take_frame() for stream in streams])
    finally:
        for stream in streams:
            stream.stop()


def _steps(stream: Stream, strategy: Strategy, actions: Tensor) -> Iterator[NextStep | None]:
    """Yield the steps that write a frame after each of the actions (T, n), by a strategy."""
    while len(actions):
        if not (fitting := stream.room() or int(stream.is_endless)):
            stream.drop_oldest()
            yield None  # until the prompt is read
            continue
        part, actions = actions[:fitting], actions[fitting:]
        held = min(stream.num_held, 2)  # stand-ins reach 2 frames back
        layout = stream.frame.layout(len(part), held, stream.num_used > 0, stream.before)
        stream.open(layout, part)
        yield from decode(strategy, stream, layout)
        stream.num_whole = stream.num_open
        while stream.num_taken < stream.num_open:
            yield None


def _check_seeds(seed: int | list[int], batch_size: int) -> list[int]:
    given = seed if isinstance(seed, list) else [whole(seed, "seed") + b for b in range(batch_size)]
    if len(seeds := [whole(value, "seed") for value in given]) != batch_size:
        raise ValueError(f"expected one seed, or one per row ({batch_size}), got {len(seeds)}")
    for value in seeds:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {value}")
    return seeds


def _check_actions(
    actions: Tensor | None, shape: tuple[int, int, int], num_embeddings: int
) -> Tensor:
    if actions is None and not shape[2]:
        return torch.empty(shape, dtype=int64)
    if actions is None or actions.shape != shape or actions.dtype != int64:
        given = None if actions is None else f"{actions.dtype} of shape {tuple(actions.shape)}"
        raise ValueError(
            f"actions must be int64 of shape (batch, frames, tokens) = {shape}, got {given}"
        )
    check_ids(actions, num_embeddings, "actions")
    return actions


def _check_room(stream: Stream, num_frames: int) -> None:
    """Raise ValueError for a stream that would be stuck in a full context."""
    coming = stream.frame.layout(num_frames, 0, stream.num_used > 0)
    shift = max(stream.shifts)
    if stream.is_endless or stream.num_used + shift + coming.num_slots <= stream.max_slots:
        return
    kept, layout = stream.keep_frames, stream.frame.layout(1, stream.keep_frames)
    slots = stream.num_prefix + shift + layout.context_slots + layout.slots_per_frame
    if slots > stream.max_slots:
        raise ValueError(
            f"keep_frames={kept} and one more frame need {slots} slots, "
            f"the context holds {stream.max_slots} slots"
        )
    if not kept and not stream.num_prefix and not layout.num_leading:
        raise ValueError("keep_frames must be at least 1 without prefix and actions, got 0")


@dataclass(frozen=True)
class GenerationStats:
    """Steps, tokens, time and memory of a generation."""

    num_steps: int  # forward passes of decoding, without prefills
    num_fed: int  # tokens fed in them, of the batch row with the most
    seconds: float  # wall-clock time of decoding, including prefills of a full context
    capture_seconds: float  # capturing and compiling CUDA graphs, not in `seconds`
    prefill_seconds: float  # prefill of the prompt
    tokens_per_second: float  # visual tokens of all batch rows per second of `seconds`
    frames_per_second: float  # frames of all batch rows per second of `seconds`
    peak_memory_bytes: int  # peak of allocated CUDA memory; on the CPU the process's peak
    num_dropped_frames: int  # frames that left a full context


@dataclass(frozen=True)
class GeneratedTokens:
    """Generated frames: `tokens`, (B, T, height, width) int64, and `stats` of the generation."""

    tokens: Tensor
    stats: GenerationStats


def generate_tokens(
    model: CausalModel,
    prompt: Tensor | Sequence[Tensor],
    schedule: DiagonalSchedule | Strategy | str,
    actions: Tensor | None = None,
    context_frames: int | Sequence[int] = 1,
    grid: TokenGrid | None = None,
    sampling: SamplingOptions | None = None,
    seed: int | list[int] = 0,
    *,
    frame: FrameFormat | None = None,
    on_start: Callable[[DecodingEngine], object] | None = None,
    on_frame: Callable[[int], object] | None = None,
    on_step: Callable[[int], object] | None = None,
    **engine: Any,
) -> GeneratedTokens:
    """Continue a prompt by a number of frames (arXiv:2503.14070, section 3.2).

    Args:
        model: model from `load_model` or `HuggingFaceModel` (see `CausalModel`).
        prompt: (B, P) int64, or B prompts (P,) of any lengths: `context_frames` frames with the
            actions between them, after a text or BOS prefix if the model has one.
        schedule: a schedule, which includes a grid, or a strategy, by name (`k=1`, `exact`; see
            `diagd.decoding.strategies`) or as a value.
        actions: (B, T, n) int64, the n conditioning tokens before each frame; None if the model
            has none.
        context_frames: frames at the end of the prompt, 0 or more, one number or one for each:
            stand-ins are taken from them, and they leave first when the context is full.
        grid: frames to generate, if `schedule` is a strategy.
        sampling: sampling options (see `SamplingOptions`); default: greedy.
        seed: 64 bits: one number (batch row b uses seed + b) or one for each row.
        frame: format of frames that are more than a grid after their actions: the images of two
            cameras.
        engine: other arguments of `DecodingEngine`: context, (1 or B, M, size) cross-attention
            input for models that have one; max_slots, the context length, and keep_frames, the
            frames to prefill again when it is full; rule, which lane sees which token (see
            `diagd.decoding.visibility`).
        on_start: called with the engine when it has read the prompts, to watch its streams.
        on_frame: called after each frame with the number of frames so far.
        on_step: called after each step with the number of steps so far.

    Raises:
        ValueError: arguments that do not fit the model, the schedule or each other.
    """
    if isinstance(prompt, Tensor) and prompt.ndim != 2:
        raise ValueError(f"prompt must be of shape (batch, P), got {tuple(prompt.shape)}")
    if isinstance(schedule, DiagonalSchedule):
        if grid not in (None, schedule.grid):
            raise ValueError(f"grid must be that of the schedule, {schedule.grid}, got {grid}")
        grid = schedule.grid
    strategy = as_strategy(schedule)
    if grid is None:
        raise ValueError(f"grid must be given for strategy {strategy}")
    num_actions = actions.shape[-1] if actions is not None and actions.ndim else 0
    frame = frame or FrameFormat(grid.height, grid.width, num_actions)
    max_slots: int | Sequence[int | None] | None = engine.pop("max_slots", None)
    coming = frame.layout(grid.num_frames).num_slots
    each = [model.prompts_of(one, row, len(prompt)) for row, one in enumerate(prompt)]
    needed = [coming + max(map(len, of_row)) for of_row in each]
    held = max_slots if isinstance(max_slots, Sequence) else [max_slots] * len(needed)
    holds = [
        count if limit is None else min(count, whole(limit, "max_slots"))
        for count, limit in zip(needed, held, strict=True)
    ]
    given = frame, len(prompt), sampling, seed
    decoder = DecodingEngine(model, *given, max_slots=holds, **engine)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    started = synchronized_time(model.device)
    decoder.prefill(prompt, context_frames)
    prefilled = synchronized_time(model.device)
    if on_start is not None:
        on_start(decoder)
    frames = list[Tensor]()
    for written in decoder.decode(strategy, actions, grid.num_frames, on_step):
        frames.append(written)
        if on_frame is not None:
            on_frame(len(frames))
    tokens = torch.stack(frames, dim=1)
    times = started, prefilled, synchronized_time(model.device)
    made = tokens.numel(), tokens.shape[0] * grid.num_frames
    return GeneratedTokens(tokens, _stats(decoder.batch, decoder.streams, times, made))


@dataclass(frozen=True)
class GeneratedGrids:
    """Grids of each prompt: `tokens`, (height, width) int64 each, and `stats` of all of them."""

    tokens: list[list[Tensor]]
    stats: GenerationStats


def generate_grids(
    model: CausalModel,
    prompts: Sequence[Tensor],
    formats: Sequence[Sequence[FrameFormat]],
    strategy: Strategy | str,
    sampling: SamplingOptions | None = None,
    seed: int | list[int] = 0,
    *,
    sections: Sequence[Sequence[Section]] | None = None,
    read_again: bool = True,
    on_grid: Callable[[int], object] | None = None,
) -> GeneratedGrids:
    """Write grids of several formats behind each prompt, such as a preview and then a picture.

    Args:
        model: what to decode with (see `CausalModel`).
        prompts: B of (P,) int64, of any lengths, each ending with the token before its first grid.
        formats: of each prompt's grids, in order, without conditioning tokens.
        strategy: how to decode each grid, by name (see `diagd.decoding.strategies`) or as a value.
        sampling, seed: as of `generate_tokens`.
        sections: grids that stand in each prompt, for models that place them (see `Section`).
        read_again: whether a grid is fed causally, as in training, before the next one begins, or
            stays as diagonals have fed it.
        on_grid: called with how many grids there are, whenever there are more.

    Raises:
        ValueError: arguments that do not fit the model or each other.
    """
    strategy, count = as_strategy(strategy), len(prompts)
    placed = [()] * count if sections is None else sections
    for name, given in (("formats", formats), ("sections", placed)):
        if not count or len(given) != count or not all(formats):
            raise ValueError(f"{name} must be some for each of {count} prompts, got {len(given)}")
    for frame in (one for of_row in formats for one in of_row):
        if frame.num_action_tokens:
            raise ValueError(f"grids stand without conditioning tokens, got {frame}")
        strategy.check(frame.grid)
    if strategy.promise == "tokens":  # all it has written was fed causally
        read_again = False
    each = [model.prompts_of(prompt, row, count) for row, prompt in enumerate(prompts)]
    coming = [sum(one.one.num_slots for one in of_row) for of_row in formats]
    slots = max(max(map(len, own)) + new for own, new in zip(each, coming, strict=True))
    if slots > model.max_positions:
        held = model.max_positions
        raise ValueError(f"prompt and grids take {slots} tokens, the context holds {held}")
    for prompt in prompts:
        model.check_prompt(prompt[None], 0)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    started = synchronized_time(model.device)
    batch = Batch(model, count * (1 + len(model.scales)), slots + 1)
    streams = list[Stream]()
    for row, number in enumerate(_check_seeds(seed, count)):
        streams.append(stream := batch.admit(formats[row][0], sampling, number))
        stream.prefill(stream.prompts_of(prompts[row], 0, row, count), 0, placed[row])
    while any(stream.num_unread for stream in streams):
        batch.step()
    prefilled, nothing = synchronized_time(model.device), torch.empty(1, 0, dtype=int64)
    tokens = [list[Tensor]() for _ in streams]
    for stream in streams:
        write_frames(stream, strategy, nothing)
    while any(stream.is_writing for stream in streams):
        batch.step()
        for stream, of_row, written in zip(streams, formats, tokens, strict=True):
            if stream.num_whole == stream.num_taken:
                continue
            written.append(stream.take_frame())
            if on_grid is not None:
                on_grid(sum(map(len, tokens)))
            if len(written) == len(of_row):
                stream.stop()
            else:
                stream.go_on_with(of_row[len(written)], read_again=read_again)
                write_frames(stream, strategy, nothing)
    times = started, prefilled, synchronized_time(model.device)
    return GeneratedGrids(
        tokens, _stats(batch, streams, times, (sum(coming), sum(map(len, formats))))
    )


def _stats(
    batch: Batch,
    streams: Sequence[Stream],
    times: tuple[float, float, float],
    made: tuple[int, int],
) -> GenerationStats:
    """Count what tokens and frames have taken, begun, prefilled and ended at these times."""
    started, prefilled, ended = times
    seconds = ended - prefilled - batch.buffers.capture_seconds
    return GenerationStats(
        num_steps=batch.num_steps,
        num_fed=max(stream.num_fed for stream in streams),
        seconds=seconds,
        capture_seconds=batch.buffers.capture_seconds,
        prefill_seconds=prefilled - started,
        tokens_per_second=made[0] / seconds,
        frames_per_second=made[1] / seconds,
        peak_memory_bytes=peak_memory_bytes(batch.model.device),
        num_dropped_frames=max(stream.num_dropped_frames for stream in streams),
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated CUDA memory, or the process's peak on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_bytes()


def synchronized_time(device: torch.device) -> float:
    """Return a clock's seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
