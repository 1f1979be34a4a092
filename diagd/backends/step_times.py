"""Time steps of models of one shape side by side: one lane, as in raster order, and a diagonal's.

Models take turns, so a slow spell of the machine affects all of them; PyTorch's come last, as its
threads spin on the cores for a while after computing.
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

import torch

from diagd.decoding.model import CausalModel
from diagd.decoding.visibility import Seen
from diagd.models.config import ModelConfig

MAX_SIZE = 2**24  # of a layer's widths; larger models are not copied for timing
Name = TypeVar("Name", bound=str)
MIN_ROUNDS, SECONDS, TURN = 3, 0.5, 0.01
ENOUGH = 50  # counted steps, of which the fastest is used: tiny models finish them immediately


class StepTimes(NamedTuple):
    """Milliseconds of a step of one lane, and of a diagonal's at k=1; the minimum of all rounds."""

    raster_ms: float
    diagonal_ms: float

    @property
    def cost(self) -> float:  # to compare candidates
        return (self.raster_ms * self.diagonal_ms) ** 0.5


def _two_layers_of(config: ModelConfig) -> ModelConfig:
    plain: dict[str, Any] = dict.fromkeys(("context_size", "sliding_window"), 0)
    plain |= {"position_table": False, "sliding_layers": (), "visual_mlp_layers": ()}
    return dataclasses.replace(config, num_layers=min(2, config.num_layers), **plain)


_BUNDLED = files("diagd").joinpath("assets/doom/config.json").read_text(encoding="utf-8")
REFERENCE = _two_layers_of(ModelConfig.from_dict(json.loads(_BUNDLED)))


def shape_to_time(config: ModelConfig) -> ModelConfig:
    """Return two layers of a model, or `REFERENCE` if they are too large to copy."""
    is_large = config.hidden_size * (config.intermediate_size + config.vocab_size) > MAX_SIZE
    return REFERENCE if is_large else _two_layers_of(config)


def time_steps(config: ModelConfig, models: Mapping[Name, CausalModel]) -> dict[Name, StepTimes]:
    """Time models of a shape, each after two frames."""
    lanes = min(config.grid_height, config.grid_width, config.max_positions)
    seen = min(config.max_positions, 2 * config.tokens_per_frame)
    one, diagonal = (in_turns(models, count, seen, SECONDS / 4) for count in (1, lanes))
    return {name: StepTimes(1000 * min(one[name]), 1000 * min(diagonal[name])) for name in models}


@torch.inference_mode()
def in_turns(
    models: Mapping[Name, CausalModel], lanes: int, seen: int, seconds: float
) -> dict[Name, list[float]]:
    """Return the times of each model's steps, for these lanes and visible slots.

    The first half of a model's turn is a warm-up that loads weights into the cache.
    """
    slots = torch.arange(seen - lanes, seen)
    tokens, held = torch.zeros(1, lanes, dtype=torch.int64), torch.arange(seen)
    rule = Seen(slots, slots, held, held)
    caches = {name: model.make_cache(1, seen + 1) for name, model in models.items()}
    took: dict[Name, list[float]] = {name: [] for name in models}
    started, rounds, few = time.perf_counter(), 0, True
    while rounds < MIN_ROUNDS or (few and time.perf_counter() - started < seconds):
        for name, model in models.items():
            turn, steps = time.perf_counter(), list[float]()
            while len(steps) < 2 or (time.perf_counter() - turn < TURN and len(steps) < ENOUGH):
                since = time.perf_counter()
                model.forward(tokens, slots, slots, rule, caches[name])
                steps.append(time.perf_counter() - since)
            took[name] += steps[len(steps) // 2 :]
        rounds, few = rounds + 1, any(len(counted) < ENOUGH for counted in took.values())
    return took
