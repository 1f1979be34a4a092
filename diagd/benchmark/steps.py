"""Time steps, count bytes read and operations, and measure the machine's limits."""

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from diagd.backends.linears import multiplies_packed
from diagd.backends.native.library import load_library
from diagd.backends.native.model import NativeModel
from diagd.decoding.generate_tokens import synchronized_time
from diagd.decoding.model import CausalModel, ModelWrapper, Step, StepFunction
from diagd.decoding.step import run_steps
from diagd.models.config import ModelConfig

_STREAM_NUMBERS = 2**28  # float32: 1 GiB, larger than any cache
_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a machine."""

    bytes_per_second: float  # of reading 1 GiB with all threads; on a GPU of copying it, both ways
    flops_per_second: float  # square matrix product, in the fastest number type


@cache
def measure_ceilings(device: torch.device, *dtypes: torch.dtype) -> Ceilings:
    """Measure the machine's limits, once: the best of five runs for each."""
    # PyTorch's own bfloat16 loop, used where oneDNN has none, takes minutes
    if device.type == "cpu" and not multiplies_packed(torch.bfloat16):
        dtypes = (torch.float32,)
    stream, moved = _stream(torch.ones(_STREAM_NUMBERS, device=device))
    size = _MATRIX_SIZE[device.type]
    matrices = (torch.ones(size, size, device=device, dtype=dtype) for dtype in dtypes)
    seconds = [_fastest(partial(torch.matmul, one, one), device) for one in matrices]
    return Ceilings(
        bytes_per_second=moved / _fastest(stream, device),
        flops_per_second=2 * size**3 / min(seconds),
    )


@cache
def read_rate(device: torch.device, num_bytes: int) -> float:
    """Measure the bytes per second of reading `num_bytes` repeatedly; a few stay in caches."""
    stream, moved = _stream(torch.ones(min(_STREAM_NUMBERS, num_bytes // 4 + 1), device=device))
    return moved / _fastest(stream, device)


def _stream(numbers: torch.Tensor) -> tuple[Callable[[], object], int]:
    """Return a function that reads the numbers once, and how many bytes it moves."""
    if numbers.device.type != "cpu":
        goal = torch.empty_like(numbers)
        return lambda: goal.copy_(numbers), 2 * numbers.nbytes
    try:
        stream = load_library().stream
    except OSError:  # our own loop does not build here
        return numbers.sum, numbers.nbytes
    return lambda: stream(  # keeps the numbers alive, not only their address
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_int64(numbers.numel()),
        torch.get_num_threads(),
    ), numbers.nbytes


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = synchronized_time(device)
        run()
        seconds.append(synchronized_time(device) - started)
    return min(seconds)


@dataclass
class StepTimes:
    """Seconds, lanes and slots of each step, and seconds of all steps by part."""

    seconds: list[float] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    # `forward` (the native kernels split it into `linears` and `attention`), `sampling`,
    # and `bookkeeping`, the rest of a step
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Stopwatch(ModelWrapper[CausalModel]):
    """Time a model, and the steps in which an engine runs it.

    No step waits for the device; of steps that a model takes at once, each is given the mean. With
    `parts`, model and sampler are timed as well, on the CPU with eager steps only: compiled and
    captured steps cannot be split. With `sample_size`, only about that many steps of each run,
    evenly spaced, are run and timed, one by one; the others and the prompt are skipped: the tokens
    are then meaningless, but step times are unaffected.
    """

    def __init__(self, model: CausalModel, parts: bool, sample_size: int | None = None) -> None:
        super().__init__(model)
        self.sample_size = sample_size
        self.steps_at_once = 1 if parts or sample_size else model.steps_at_once
        self._times = StepTimes()
        self._moments: list[tuple[Any, Any, int]] = []  # start, end, and steps in between
        self._stride, self._num_seen = 1, 0
        self._in_step = False
        self._counters: Tensor | None = None  # NativeModel.seconds, cumulative
        if parts and isinstance(model, NativeModel):
            if model.seconds is None:  # shared by all users of the model
                model.seconds = torch.zeros(4, dtype=torch.float64)
            self._counters = model.seconds
        self._by_part = parts and self._counters is None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.sample_size and not self._in_step:  # prefill
            return torch.empty(0)
        return self._timed("forward", super().forward, args, kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._timed("sampling", super().sample, args, kwargs)

    def begin(self, num_steps: int) -> None:
        """Spread the sample over a run of `num_steps`."""
        self._num_seen = 0
        self._stride = max(1, num_steps // self.sample_size) if self.sample_size else 1

    def collect(self) -> StepTimes:
        """Return the measurements since the last call; waits for the device."""
        times, self._times = self._times, StepTimes()
        on_cpu, moments, self._moments = self.device.type == "cpu", self._moments, []
        for start, end, count in moments:
            seconds = end - start if on_cpu else start.elapsed_time(end) / 1000
            times.seconds += [seconds / count] * count
        if times.parts:
            known = times.parts["forward"] + times.parts.get("sampling", 0.0)
            times.parts["bookkeeping"] = sum(times.seconds) - known
        return times

    def make_step(self, step: Step) -> StepFunction:
        """Time the model's own step; or its parts, if the model does not time them itself."""
        fused = None if self._by_part else self.model.make_step(step)
        run = fused or partial(run_steps, self if self._by_part else self.model, step)

        def timed(steps: Sequence[Tensor], num_slots: int, first: int = 0) -> None:
            self._num_seen += len(steps)
            if (self._num_seen - self._stride // 2 - 1) % self._stride:
                return
            self._in_step = True
            counters = self._counters
            before = None if counters is None else counters.clone()
            started = self._now()
            run(steps, num_slots, first)
            self._moments.append((started, self._now(), len(steps)))
            self._times.lanes += [lanes.shape[2] for lanes in steps]
            self._times.slots += [num_slots] * len(steps)
            if counters is not None and before is not None:
                linears, attention, rest, drawing = (counters - before).tolist()
                parts = self._times.parts
                parts["linears"] += linears
                parts["attention"] += attention
                parts["forward"] += linears + attention + rest
                parts["sampling"] += drawing
            self._in_step = False

        return timed

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _timed(self, part: str, call: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        if not (self._by_part and self._in_step):
            return call(*args, **kwargs)
        started = time.perf_counter()
        result = call(*args, **kwargs)
        self._times.parts[part] += time.perf_counter() - started
        return result


def linear_parameters(config: ModelConfig) -> int:
    """Count the weights multiplied in every step, output layer included."""
    num_queries = config.num_heads * (2 if config.context_size else 1)  # a text's keys are cached
    attention = (2 * num_queries + 2 * config.num_kv_heads) * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.intermediate_size
    layers = config.num_layers * config.hidden_size * (attention + mlp)
    head = config.hidden_size * config.head_size
    return layers + head + (config.head_size or config.hidden_size) * config.vocab_size


def slot_bytes(config: ModelConfig, cache_bytes: float) -> float:
    """Count the bytes of a cache slot's keys and values, at `cache_bytes` per number."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_bytes


def slots_read(config: ModelConfig, slots: int) -> float:
    """Return the slots read by a step over `slots`, averaged over layers: some may slide."""
    sliding = len(config.sliding_layers) / config.num_layers
    return slots - sliding * max(0, slots - config.sliding_window)


def bytes_read(
    config: ModelConfig, times: StepTimes, weight_bytes: float, cache_bytes: float
) -> float:
    """Count the bytes of weights and cache read by steps, at these bytes per number."""
    weights = linear_parameters(config) * weight_bytes
    slots = sum(slots_read(config, slots) for slots in times.slots)
    return weights * len(times.slots) + slot_bytes(config, cache_bytes) * slots


def flops(config: ModelConfig, times: StepTimes) -> float:
    """Count the multiplications and additions of steps, including padded lanes."""
    steps = zip(times.lanes, times.slots, strict=True)
    pairs = sum(lanes * slots_read(config, slots) for lanes, slots in steps)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * linear_parameters(config) * sum(times.lanes) + attention
