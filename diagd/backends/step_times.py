"""Time steps of models of one shape side by side: one lane, as in raster order, and a diagonal's.

What runs a model is chosen by this (`prepare.py`), and which build of our kernels is kept
(`native/library.py`). Models take turns, so a machine that slows down slows all of them.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from diagd.decoding.runner import CausalModel
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
MIN_ROUNDS, SECONDS = 3, 0.5


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
    return dataclasses.replace(config, num_layers=layers, context_size=0, position_table=False)


@torch.inference_mode()
def time_steps(models: Mapping[str, CausalModel], config: ModelConfig) -> dict[str, StepTimes]:
    """Time models of a shape, each after two frames, for half a second or three rounds."""
    lanes = min(config.grid_height, config.grid_width)
    seen = max(lanes, min(config.max_positions, 2 * config.tokens_per_frame))
    steps = [torch.arange(seen - count, seen) for count in (1, lanes)]
    caches = {name: model.make_cache(1, seen + 1) for name, model in models.items()}
    best = {name: [float("inf")] * 2 for name in models}
    started, rounds = time.perf_counter(), 0
    while rounds <= MIN_ROUNDS or time.perf_counter() - started < SECONDS:
        for name, model in models.items():
            for which, slots in enumerate(steps):
                tokens = torch.zeros(1, len(slots), dtype=torch.int64)
                visible = slots[:, None] >= torch.arange(seen)
                since = time.perf_counter()
                model.forward(tokens, slots, slots, visible, caches[name])
                if rounds:  # the first one warms up
                    took = 1000 * (time.perf_counter() - since)
                    best[name][which] = min(best[name][which], took)
        rounds += 1
    return {name: StepTimes(*times) for name, times in best.items()}
