"""What this machine can do at best: reading or copying memory, and multiplying matrices."""

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diagd.backends.linears import multiplies_packed
from diagd.backends.native.library import load_library
from diagd.backends.native.model import NativeModel
from diagd.decoding.generate_tokens import synchronized_time
from diagd.decoding.model import CausalModel, FusesSteps, ModelWrapper, StepFunction
from diagd.models.config import ModelConfig

_STREAM_NUMBERS = 2**28  # float32: 1 GiB, larger than any cache
_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    Attributes:
        bytes_per_second: on the CPU, reading 1 GiB, front to back, with all threads; on a GPU, a
            plain copy of 1 GiB, which counts twice: read and written.
        flops_per_second: a square matrix product, of the fastest number type.
    """

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(device: torch.device, *dtypes: torch.dtype) -> Ceilings:
    """Measure both, the best of five runs each.

    bfloat16 is left to float32 where oneDNN does not multiply it: PyTorch's own loop takes minutes.
    """
    if device.type == "cpu" and not multiplies_packed(torch.bfloat16):
        dtypes = (torch.float32,)
    stream, moved = _stream(torch.ones(_STREAM_NUMBERS, device=device))
    size = _MATRIX_SIZE[device.type]
    seconds = list[float]()
    for dtype in dtypes:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds.append(_fastest(lambda matrix=matrix: matrix @ matrix, device))
    return Ceilings(
        bytes_per_second=moved / _fastest(stream, device),
        flops_per_second=2 * size**3 / min(seconds),
    )


def _stream(numbers: torch.Tensor) -> tuple[Callable[[], object], int]:
    """Return a function that goes through the numbers once, and how many bytes it moves.

    On the CPU it reads them, with our own loop where it can be built.
    """
    if numbers.device.type != "cpu":
        goal = torch.empty_like(numbers)
        return lambda: goal.copy_(numbers), 2 * numbers.nbytes
    try:
        stream = load_library().stream
    except OSError:
        return numbers.sum, numbers.nbytes
    return lambda: stream(
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


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 99th percentile, least and most."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "min": ordered[0],
        "max": ordered[-1],
    }


class Moments:
    """Points in time, noted without waiting: of the host, or in a GPU's queue of kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return this moment."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return what lies between two moments; on a GPU, once it has been waited for."""
        return end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1000


@dataclass
class StepTimes:
    """Seconds of each step, and seconds of all of them by part.

    The parts are `forward` (the model; the native kernels tell how much of it `linears` and
    `attention` are), `sampling`, and `bookkeeping`, the rest of a step.
    """

    seconds: list[float] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


class Stopwatch(ModelWrapper[CausalModel]):
    """Stands between an engine and its model, and around its steps, and times them.

    It is a model: what the engine asks of the one behind it passes through here. `times` collects
    until `take` hands it out. Nothing in a step waits for the device.

    Args:
        model: the one behind it.
        parts: time the model and the sampler, too; on the CPU with eager steps only, for a compiled
            or captured step has no seams.
        sample: run and time about so many steps of each run, evenly spread, and skip the others.
            The prompt is not read either. What is written then means nothing; how long a step takes
            does not depend on it.
    """

    def __init__(self, model: CausalModel, parts: bool, sample: int | None = None) -> None:
        super().__init__(model)
        self.parts, self.sample_size = parts, sample
        self.times, self.moments = StepTimes(), Moments(model.device)
        self.timed: list[tuple[Any, Any]] = []  # when steps began and ended
        self.stride, self.num_seen = 1, 0
        self.counters: Tensor | None = None  # NativeModel.seconds, ever growing
        self.in_step = self.skips = False
        if parts and isinstance(model, NativeModel):
            if model.seconds is None:  # one for all that time the model
                model.seconds = torch.zeros(4, dtype=torch.float64)
            self.counters = model.seconds

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the model, and count the seconds."""
        if self.skips:
            return torch.empty(0)
        return self._timed("forward", super().forward, args, kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw, and count the seconds."""
        return self._timed("sampling", super().sample, args, kwargs)

    def fused_step(self, *args: Any, **kwargs: Any) -> StepFunction | None:
        """Let the model fuse its steps, unless it would not tell what their parts take."""
        if not isinstance(self.model, FusesSteps) or (self.parts and self.counters is None):
            return None
        return self.model.fused_step(*args, **kwargs)

    @contextlib.contextmanager
    def prefill(self) -> Iterator[None]:
        """Let a prompt be taken in; without running the model where steps are a sample."""
        self.skips = self.sample_size is not None
        try:
            yield
        finally:
            self.skips = False

    def begin(self, num_steps: int) -> None:
        """Say how many steps the coming run has."""
        self.num_seen = 0
        self.stride = max(1, num_steps // self.sample_size) if self.sample_size else 1

    def mean_seconds(self) -> float:
        """Return the mean of the steps timed since the last `take`, once the device is done."""
        return sum(self._seconds()) / len(self.timed)

    def take(self) -> StepTimes:
        """Hand out what was measured since the last call, once the device is done."""
        times, self.times = self.times, StepTimes()
        times.seconds, self.timed = self._seconds(), []
        if times.parts:
            known = times.parts["forward"] + times.parts.get("sampling", 0.0)
            times.parts["bookkeeping"] = sum(times.seconds) - known
        return times

    def around_step(self, run: StepFunction) -> StepFunction:
        """Return the step, timed; for `Stream(around_step=...)`."""

        def timed(lanes: Tensor, num_slots: int) -> None:
            self.num_seen += 1
            if (self.num_seen - self.stride // 2 - 1) % self.stride:
                return
            self.in_step = True
            before = None if self.counters is None else self.counters.tolist()
            started = self.moments.now()
            run(lanes, num_slots)
            self.timed.append((started, self.moments.now()))
            self.times.lanes.append(lanes.shape[1])
            self.times.slots.append(num_slots)
            if before is not None and self.counters is not None:
                linears, attention, rest, drawing = (
                    after - then for after, then in zip(self.counters.tolist(), before, strict=True)
                )
                self._add("linears", linears)
                self._add("attention", attention)
                self._add("forward", linears + attention + rest)
                self._add("sampling", drawing)
            self.in_step = False

        return timed

    def _seconds(self) -> list[float]:
        return [self.moments.seconds(*both) for both in self.timed]

    def _timed(self, part: str, call: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        if not (self.parts and self.in_step and self.counters is None):
            return call(*args, **kwargs)
        started = time.perf_counter()
        result = call(*args, **kwargs)
        self._add(part, time.perf_counter() - started)
        return result

    def _add(self, part: str, seconds: float) -> None:
        self.times.parts[part] = self.times.parts.get(part, 0.0) + seconds


def linear_parameters(config: ModelConfig) -> int:
    """Count the weights that every step multiplies with, the output layer included."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.intermediate_size
    layers = config.num_layers * config.hidden_size * (attention + mlp)
    return layers + config.hidden_size * config.vocab_size


def slot_bytes(config: ModelConfig, cache_bytes: float) -> float:
    """Bytes of keys and values of a cache slot, at so many bytes a number."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_bytes


def bytes_read(
    config: ModelConfig, times: StepTimes, weight_bytes: float, cache_bytes: float
) -> float:
    """Bytes of weights and cache that the steps had to read, at so many bytes a number."""
    weights = linear_parameters(config) * weight_bytes
    return weights * len(times.slots) + slot_bytes(config, cache_bytes) * sum(times.slots)


def flops(config: ModelConfig, times: StepTimes) -> float:
    """Multiplications and additions that the steps had to do (padded lanes included)."""
    lanes = zip(times.lanes, times.slots, strict=True)
    pairs = sum(count * slots for count, slots in lanes)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * linear_parameters(config) * sum(times.lanes) + attention
