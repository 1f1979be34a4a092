"""Time every step of a decoding run, count what it reads and computes, and where its time goes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diagd.backends.native.model import NativeModel
from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.generate import synchronized_time
from diagd.models.config import ModelConfig


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


class Stopwatch:
    """Stands between an engine and its step, its model and its sampler, and times them.

    `times` collects until `take` hands it out. Parts are timed on the CPU with eager steps only:
    a compiled or captured step has no seams.

    Args:
        sample: run and time about so many steps of each run, evenly spread, and skip the others.
            The prompt is not read either. What is written then means nothing; how long a step takes
            does not depend on it.
    """

    def __init__(self, engine: DiagonalEngine, parts: bool, sample: int | None = None) -> None:
        self.times = StepTimes()
        self.sample, self.stride, self.num_seen = sample, 1, 0
        self.model, self.device = engine.model, engine.model.device
        self.counters: Tensor | None = None  # seconds of linears, attention, rest, ever growing
        self.in_step = False  # and not in a prefill
        self._run, engine.run = engine.run, self._timed_run
        if parts:
            self._forward, self._draw = engine.model.forward, engine._draw
            engine._draw = self._timed_draw  # type: ignore[method-assign]
            engine.model.forward = self._timed_forward  # type: ignore[method-assign]
            if isinstance(engine.model, NativeModel):
                if engine.model.seconds is None:  # one for all engines of the model
                    engine.model.seconds = torch.zeros(3, dtype=torch.float64)
                self.counters = engine.model.seconds

    @contextlib.contextmanager
    def prefill(self) -> Iterator[None]:
        """Let a prompt be taken in; without running the model where steps are a sample."""
        forward = self.model.forward
        if self.sample:
            self.model.forward = lambda *arguments, **settings: torch.empty(0)  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.model.forward = forward  # type: ignore[method-assign]

    def begin(self, num_steps: int) -> None:
        """Say how many steps the coming run has."""
        self.num_seen = 0
        self.stride = max(1, num_steps // self.sample) if self.sample else 1

    def take(self) -> StepTimes:
        """Hand out what was measured since the last call."""
        times, self.times = self.times, StepTimes()
        if times.parts:
            known = times.parts["forward"] + times.parts["sampling"]
            times.parts["bookkeeping"] = sum(times.seconds) - known
        return times

    def _timed_run(self, lanes: Tensor, num_slots: int) -> None:
        self.num_seen += 1
        if (self.num_seen - self.stride // 2 - 1) % self.stride:
            return
        self.in_step = True
        before = None if self.counters is None else self.counters.tolist()
        started = synchronized_time(self.device)
        self._run(lanes, num_slots)
        self.times.seconds.append(synchronized_time(self.device) - started)
        self.times.lanes.append(lanes.shape[1])
        self.times.slots.append(num_slots)
        if before is not None and self.counters is not None:
            for index, part in enumerate(("linears", "attention")):
                self._add(part, self.counters[index].item() - before[index])
        self.in_step = False

    def _timed_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        started = synchronized_time(self.device)
        logits = self._forward(*args, **kwargs)
        self._add("forward", synchronized_time(self.device) - started)
        return logits

    def _timed_draw(self, *args: Any) -> Tensor:
        started = synchronized_time(self.device)
        drawn = self._draw(*args)
        self._add("sampling", synchronized_time(self.device) - started)
        return drawn

    def _add(self, part: str, seconds: float) -> None:
        if not self.in_step:
            return
        self.times.parts[part] = self.times.parts.get(part, 0.0) + seconds


def linear_parameters(config: ModelConfig) -> int:
    """Count the weights that every step multiplies with, the output layer included."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.intermediate_size
    layers = config.num_layers * config.hidden_size * (attention + mlp)
    return layers + config.hidden_size * config.vocab_size


def bytes_read(
    config: ModelConfig, times: StepTimes, weight_bytes: float, cache_bytes: float
) -> float:
    """Bytes of weights and cache that the steps had to read, at so many bytes a number."""
    slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_bytes
    weights = linear_parameters(config) * weight_bytes
    return weights * len(times.seconds) + slot * sum(times.slots)


def flops(config: ModelConfig, times: StepTimes) -> float:
    """Multiplications and additions that the steps had to do (padded lanes included)."""
    lanes = zip(times.lanes, times.slots, strict=True)
    pairs = sum(count * slots for count, slots in lanes)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * linear_parameters(config) * sum(times.lanes) + attention
