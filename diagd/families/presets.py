"""Models by name: the bundled ones, and shapes (`Transformer.random(PRESETS[name])`)."""

import math
from pathlib import Path

from diagd.families.chameleon.presets import PRESETS as CHAMELEON
from diagd.families.cosmos.presets import PRESETS as COSMOS
from diagd.families.emu3.presets import PRESETS as EMU3
from diagd.families.iris.presets import PRESETS as IRIS
from diagd.families.janus.presets import PRESETS as JANUS
from diagd.families.llamagen.presets import PRESETS as LLAMAGEN
from diagd.families.llamagen.presets import TEXT_PRESETS as LLAMAGEN_T2I
from diagd.families.mineworld.presets import PRESETS as MINEWORLD
from diagd.families.wham.presets import PRESETS as WHAM
from diagd.models.config import ModelConfig

ASSETS = Path(__file__).resolve().parent.parent / "assets"

_GRID, _FRAMES = (14, 24), 8  # tokens of a frame of the bundled world; frames its models hold
_NUM_CODES, _NUM_ACTIONS = 1024, 6
_SIZES = ((128, 3), (192, 4), (256, 5), (320, 6), (448, 8), (576, 10))  # width, depth


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


# World models of 0.8 to 42 million weights, among which `diagd train` chooses.
WORLD_SIZES = {f"mc-ar-{width}x{depth}": _doom(width, depth) for width, depth in _SIZES}
PRESETS: dict[str, ModelConfig] = {
    "mc-ar-doom": WORLD_SIZES["mc-ar-320x6"],  # the bundled world model
    "mc-ar-doom-small": WORLD_SIZES["mc-ar-192x4"],  # beside it, to compare sizes
    **WORLD_SIZES,
    **WHAM,
    **COSMOS,
    **MINEWORLD,
    **IRIS,
    **LLAMAGEN,
    **LLAMAGEN_T2I,
    **JANUS,
    **CHAMELEON,
    **EMU3,
}


def available_models() -> list[str]:
    """Return the names of the bundled models, which `load_model` takes."""
    return sorted(path.parent.name for path in ASSETS.glob("*/model.safetensors"))
