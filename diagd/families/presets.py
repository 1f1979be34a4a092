"""Shapes of the models people have, by name: `Transformer.random(PRESETS[name])` for benchmarks."""

import math

from diagd.families.table import FAMILIES
from diagd.models.config import ModelConfig

_GRID = (14, 24)  # rows and columns of a frame of the bundled world
_FRAMES = 8  # that its models hold
_NUM_CODES, _NUM_ACTIONS = 1024, 6


def _doom(hidden_size: int, num_layers: int) -> ModelConfig:
    head_dim = 64
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 14 // 5 // 64 * 64,
        num_layers=num_layers,
        num_heads=hidden_size // head_dim,
        num_kv_heads=hidden_size // head_dim,
        head_dim=head_dim,
        vocab_size=_NUM_CODES + _NUM_ACTIONS,
        image_vocab_size=_NUM_CODES,
        max_positions=_FRAMES * (math.prod(_GRID) + 1) - 1,  # no action before the first frame
        grid_height=_GRID[0],
        grid_width=_GRID[1],
        num_action_tokens=1,
        bias=True,
        position="rope3d",
        rope_theta=100.0,
        rope_step=math.pi,
    )


PRESETS: dict[str, ModelConfig] = {
    "mc-ar-doom": _doom(hidden_size=320, num_layers=6),  # the bundled world model
    "mc-ar-doom-small": _doom(hidden_size=192, num_layers=4),  # beside it, to compare sizes
    **{name: preset for family in FAMILIES for name, preset in family.presets.items()},
}
