"""Models by name: the bundled ones, and shapes (`Transformer.random(PRESETS[name])`)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

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
_COSMOS_4B = ModelConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=64000,
    image_vocab_size=64000,
    max_positions=5 * 40 * 64,
    grid_height=40,
    grid_width=64,
    qk_norm=True,
    position="rope3d",
    rope_theta=500000.0,
)
_COSMOS_12B = replace(_COSMOS_4B, hidden_size=5120, num_layers=40, yarn_factor=2.0)
# Video2World: a token before the first frame, and a text of 1,024 numbers a place.
_TEXT = {"max_positions": _COSMOS_4B.max_positions + 1, "prefix_length": 1}
_TEXT |= {"extra_embeddings": 64, "context_size": 1024, "position_table": True}
COSMOS = {
    "cosmos-4b": _COSMOS_4B,
    "cosmos-5b": replace(_COSMOS_4B, **_TEXT),
    "cosmos-12b": _COSMOS_12B,
    "cosmos-13b": replace(_COSMOS_12B, **_TEXT),
}


def _of_images(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_codes: int,
    side: int,
    num_words: int,
    **fields: Any,
) -> ModelConfig:
    """Describe a LLaMA that reads words and writes images of side x side codes."""
    head_dim = 128
    usual: dict[str, Any] = {"num_kv_heads": hidden_size // head_dim, "grid_width": side}
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=hidden_size // head_dim,
        head_dim=head_dim,
        vocab_size=num_codes,
        image_vocab_size=num_codes,
        grid_height=side,
        extra_embeddings=num_words,
        **usual | fields,
    )


_JANUS = {"max_positions": 16384, "norm_eps": 1e-6}
JANUS = {
    "janus-pro-1b": _of_images(2048, 5632, 24, 16384, 24, 102400, head_size=2048, **_JANUS),
    "janus-pro-7b": _of_images(4096, 11008, 30, 16384, 24, 102400, head_size=4096, **_JANUS),
}
_NORMS = {"norm_eps": 1e-5, "qk_norm": True, "head_norm": True}
CHAMELEON = {
    "chameleon-7b": _of_images(4096, 11008, 32, 8192, 32, 65536, max_positions=4096, **_NORMS)
}
# With the codes stands what ends a row, a column more; 184,622 ids in all.
_EMU3 = {"num_kv_heads": 8, "grid_width": 91, "max_positions": 9216, "rope_theta": 1e6}
_EMU3 |= {"prefix_length": 1}
EMU3 = {"emu3": _of_images(4096, 14336, 32, 32769, 90, 184622 - 32769, **_EMU3)}
IRIS = {
    "iris": ModelConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_layers=10,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=512 + 18,  # codes, and all buttons of an Atari
        image_vocab_size=512,
        max_positions=20 * (4 * 4 + 1),
        grid_height=4,
        grid_width=4,
        num_action_tokens=1,
        norm="layer",
        mlp="exact_gelu",
        bias=True,
        position="learned",
        head_size=256,
    )
}
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
