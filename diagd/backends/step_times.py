"""Time steps of models of one shape side by side: one lane, as in raster order, and a diagonal's.

What runs a model is chosen by this (`prepare.py`), and which build of our kernels is kept
(`native/library.py`). Models take turns, so a machine that slows down slows all of them; PyTorch's
come last, for its threads spin on the cores for a while after they have computed.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch

from diagd.decoding.model import CausalModel
from diagd.models.config import ModelConfig

REFERENCE = ModelConfig(  # the bundled world's, but for the number of layers
    hidden_size=320,
    intermediate_size=896,
    num_layers=2,
    num_heads=5,
    num_kv_heads=5,
    head_dim=64,
    vocab_size=4108,
    image_vocab_size=4096,
    max_positions=2695,
    grid_height=14,
    grid_width=24,
    num_action_tokens=1,
    bias=True,
    position="rope3d",
)
MAX_SIZE = 2**24  # of a layer's widths: of a larger one no copy is made to be timed
Name = TypeVar("Name", bound=str)
MIN_ROUNDS, SECONDS, TURN = 3, 0.5, 0.01


class StepTimes(NamedTuple):
    """Milliseconds of a step of one lane, and of a diagonal's at k=1; the least of all rounds."""

    raster_ms: float
    diagonal_ms: float

    @property
    def cost(self) -> float:
        """Their geometric mean, by which candidates are compared."""
        return (self.raster_ms * self.diagonal_ms) ** 0.5


def shape_to_time(config: ModelConfig) -> ModelConfig:
    """Return two layers of a model, or `REFERENCE` where they are too large to be made for this."""
    if config.hidden_size * (config.intermediate_size + config.vocab_size) > MAX_SIZE:
        return REFERENCE
    layers = min(2, config.num_layers)
    return dataclasses.replace(
        config,
        num_layers=layers,
        context_size=0,
        position_table=False,
        sliding_window=0,
        sliding_layers=(),
    )


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
    """Return what each of a model's steps took, of so many lanes that see so many slots.

    Of a model's turn the first half does not count: it fetches weights into the cache.
    """
    slots = torch.arange(seen - lanes, seen)
    tokens, visible = torch.zeros(1, lanes, dtype=torch.int64), slots[:, None] >= torch.arange(seen)
    caches = {name: model.make_cache(1, seen + 1) for name, model in models.items()}
    took: dict[Name, list[float]] = {name: [] for name in models}
    started, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or time.perf_counter() - started < seconds:
        for name, model in models.items():
            turn, steps = time.perf_counter(), list[float]()
            while len(steps) < 2 or time.perf_counter() - turn < TURN:
                since = time.perf_counter()
                model.forward(tokens, slots, slots, visible, caches[name])
                steps.append(time.perf_counter() - since)
            took[name] += steps[len(steps) // 2 :]
        rounds += 1
    return took
