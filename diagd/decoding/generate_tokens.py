"""The loop: a stream of frames, written by the strategy asked for, each handed out when whole."""

import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate

import torch
from torch import Tensor

from diagd.decoding.engine import Stream, check_actions, check_grid, check_room
from diagd.decoding.model import CausalModel, RunnerName
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, RowStart, TokenGrid
from diagd.decoding.strategies.decode import decode
from diagd.decoding.strategies.strategy import Conditions, Diagonal, Exact, Strategy, as_strategy
from diagd.system import process_peak_bytes


class DecodingEngine(Stream):
    """A stream of frames from a raster-order model, read by `prefill` and written by `decode`.

    Args:
        model: what to decode with (see `CausalModel`).
        height, width: tokens of a frame.
        num_action_tokens: conditioning tokens before each generated frame, 0 or more.
        batch_size: videos decoded side by side.
        max_slots: longest sequence to hold, in tokens, at most the model's context (the default).
        keep_frames: frames that are read again when the context is full; default as in `Stream`.
        sampling: how tokens are drawn; greedy by default.
        seed: of the draws, 64 bits: one number (batch row b uses seed + b) or one for each row.
        runner: how steps are executed: `eager`, `compile`, `cuda-graph` or `compiled-graph`.
        context: (1 or B, M, size) cross-attention input for models that have one.
        around_step: wraps the function that runs a step, for those who time or count steps.

    Raises:
        ValueError: arguments that do not fit the model or each other.
    """

    # weak, for it holds the engine: in a circle, a dropped engine would keep its cache for a while
    _under_way: "weakref.ref[Generator[Tensor, None, None]] | None" = None

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Draw otherwise from the next call of `decode` on; what was compiled is made anew.

        Raises:
            ValueError: a range that does not fit the model, or a generator of `decode` under way.
        """
        under_way = self._under_way and self._under_way()
        if under_way is not None and getgeneratorstate(under_way) != GEN_CLOSED:
            raise ValueError("sampling cannot change under way: close decode's generator first")
        super().set_sampling(sampling)

    def decode(
        self,
        strategy: Strategy | DiagonalSchedule | str,
        actions: Tensor | None = None,
        num_frames: int | None = None,
    ) -> Generator[Tensor, None, None]:
        """Generate frames, each yielded as soon as its last token is final.

        The stream is advanced frame by frame: closing the generator early keeps the frames yielded
        so far and forgets the one under way; the next call of `decode` closes it, too. Where not
        all frames fit the context, the strategy runs over as many at a time as do; over one at a
        time in a context that is full, so frames do not overlap there.

        Args:
            strategy: how to decode, by name (see `diagd.decoding.strategies`) or as a value.
                A schedule says how many frames, too.
            actions: (B, T, num_action_tokens) int64; actions[:, t] stands before frame t. None
                where there are none.
            num_frames: frames to generate; default as many as the schedule or the actions have.

        Returns:
            A generator of (B, height, width) int64.

        Raises:
            ValueError: a strategy, actions or a context that do not fit, or nothing prefilled.
        """
        if not self.window:
            raise ValueError("there is nothing to go on from: prefill comes before decode")
        if isinstance(strategy, DiagonalSchedule):
            check_grid(strategy.grid, self.frame.grid)
            num_frames = strategy.grid.num_frames
        elif num_frames is None:
            if actions is None or actions.ndim < 2:
                raise ValueError("num_frames is needed where there are no actions to count")
            num_frames = actions.shape[1]
        strategy = as_strategy(strategy)
        temperature, grid = self.sampling.temperature, self.frame.grid
        strategy.check(Conditions(temperature, grid, self.batch_size, self.pad))
        layout = self.layout(num_frames, 0, self.num_used > 0)
        check_actions(actions, layout, self.batch_size, self.model.num_embeddings)
        if actions is None:
            actions = self.tokens.new_empty(self.batch_size, num_frames, 0)
        if not self.is_endless and self.num_used + layout.num_slots > self.max_slots:
            check_room(self.layout(1, self.keep_frames), self.num_prefix, self.max_slots)
        under_way = self._under_way and self._under_way()
        if under_way is not None:
            under_way.close()
        self.verified = []
        frames = self._decode(strategy, actions.to(self.tokens.device))
        self._under_way = weakref.ref(frames)
        return frames

    def _decode(self, strategy: Strategy, actions: Tensor) -> Generator[Tensor, None, None]:
        done, num_frames = 0, actions.shape[1]
        while done < num_frames:
            fitting = self.room() or int(self.is_endless)
            if not fitting:
                self.drop_oldest()
                continue
            part = actions[:, done : done + fitting]
            held = min(self.num_held, 2)  # stand-ins reach 2 frames back
            layout = self.layout(part.shape[1], held, self.num_used > 0)
            self.open(layout, part)
            for _ in decode(strategy, self, layout):
                yield self.finish_frame(self.num_used + layout.slots_per_frame)
            done += part.shape[1]


@dataclass(frozen=True)
class GenerationStats:
    """What a generation took.

    Attributes:
        num_steps: forward passes of decoding (prefills not counted).
        num_fed: tokens fed in them, for each batch row.
        seconds: wall-clock of decoding, prefills after a full context included.
        capture_seconds: wall-clock of capturing CUDA graphs, and of compiling what they hold,
            which `seconds` leaves out.
        prefill_seconds: wall-clock of the prompt's prefill.
        tokens_per_second: visual tokens of all batch rows by `seconds`.
        frames_per_second: frames of all batch rows by `seconds`.
        peak_memory_bytes: most memory allocated on a CUDA device; on the CPU the process's peak.
        num_dropped_frames: frames that left a full context.
    """

    num_steps: int
    num_fed: int
    seconds: float
    capture_seconds: float
    prefill_seconds: float
    tokens_per_second: float
    frames_per_second: float
    peak_memory_bytes: int
    num_dropped_frames: int


@dataclass(frozen=True)
class GeneratedTokens:
    """What `generate_tokens` returns.

    Attributes:
        tokens: (B, T, height, width) int64, the generated frames only.
        stats: what they took (see `GenerationStats`).
    """

    tokens: Tensor
    stats: GenerationStats


def generate_tokens(
    model: CausalModel,
    prompt: Tensor,
    schedule: DiagonalSchedule | Strategy | str,
    actions: Tensor | None = None,
    context_frames: int = 1,
    row_start: RowStart | None = None,
    sampling: SamplingOptions | None = None,
    seed: int | list[int] = 0,
    *,
    grid: TokenGrid | None = None,
    context: Tensor | None = None,
    keep_frames: int | None = None,
    runner: RunnerName = "eager",
    exact: bool = False,
) -> GeneratedTokens:
    """Continue a prompt by so many frames (arXiv:2503.14070, section 3.2).

    Args:
        model: what to decode with, from `load_model` or `HuggingFaceModel` (see `CausalModel`).
        prompt: (B, P) int64: `context_frames` frames with the actions between them, after a text
            or BOS prefix where the model has one.
        schedule: how to decode: a schedule, which has a grid of its own, or a strategy, by name
            (`k=1`, `exact`; see `diagd.decoding.strategies`) or as a value.
        actions: (B, T, n) int64, the n conditioning tokens that stand before each frame; None
            where there are none.
        context_frames: frames at the prompt's end, 0 or more: stand-ins are taken from them, and
            they are the ones that leave when the context is full.
        row_start: of a schedule, the token that stands in for a predecessor not yet known (see
            `Diagonal`), `temporal` by default; a strategy says it itself.
        sampling: how tokens are drawn (see `SamplingOptions`); greedy by default.
        seed: 64 bits: one number (batch row b uses seed + b) or one for each row.
        grid: the frames to generate, where `schedule` is a strategy.
        context: (1 or B, M, size) cross-attention input for models that have one.
        keep_frames: frames that are read again when the context is full; default as in `Stream`.
        runner: how steps are executed: `eager`, `compile`, `cuda-graph` or `compiled-graph`.
        exact: short for the strategy `exact`; of a schedule only the grid matters then.

    Raises:
        ValueError: arguments that do not fit the model, the schedule or each other.
    """
    if prompt.ndim != 2:
        raise ValueError(f"prompt must be of shape (batch, P), got {tuple(prompt.shape)}")
    strategy = as_strategy(schedule)
    if exact and (row_start is not None or not isinstance(schedule, DiagonalSchedule)):
        given = strategy if row_start is None else f"row_start={row_start!r}"
        raise ValueError(f"exact takes a DiagonalSchedule, and no row_start, got {given}")
    if isinstance(schedule, DiagonalSchedule):
        if grid not in (None, schedule.grid):
            raise ValueError(f"the schedule has a grid of its own, {schedule.grid}, got {grid}")
        grid = schedule.grid
        strategy = Diagonal(schedule.row_lag, schedule.frame_lag, row_start or "temporal")
    elif row_start is not None:
        raise ValueError(f"strategy {strategy} says its row start itself: leave row_start out")
    if grid is None:
        raise ValueError(f"strategy {strategy} needs grid, the frames to generate")
    if exact:
        strategy = Exact()
    num_actions = actions.shape[-1] if actions is not None and actions.ndim else 0
    engine = DecodingEngine(
        model,
        grid.height,
        grid.width,
        num_action_tokens=num_actions,
        batch_size=prompt.shape[0],
        max_slots=prompt.shape[1] + grid.num_frames * (num_actions + grid.tokens_per_frame),
        keep_frames=keep_frames,
        sampling=sampling,
        seed=seed,
        runner=runner,
        context=context,
    )
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    started = synchronized_time(model.device)
    engine.prefill(prompt, context_frames)
    prefilled = synchronized_time(model.device)
    tokens = torch.stack(list(engine.decode(strategy, actions, grid.num_frames)), dim=1)
    seconds = synchronized_time(model.device) - prefilled - engine.capture_seconds
    stats = GenerationStats(
        num_steps=engine.num_steps,
        num_fed=engine.num_fed,
        seconds=seconds,
        capture_seconds=engine.capture_seconds,
        prefill_seconds=prefilled - started,
        tokens_per_second=tokens.numel() / seconds,
        frames_per_second=tokens.shape[0] * grid.num_frames / seconds,
        peak_memory_bytes=peak_memory_bytes(model.device),
        num_dropped_frames=engine.num_dropped_frames,
    )
    return GeneratedTokens(tokens, stats)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on a CUDA device, or the process's peak on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_bytes()


def synchronized_time(device: torch.device) -> float:
    """Return seconds on a clock, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
