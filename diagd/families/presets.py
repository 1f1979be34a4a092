"""Models by name: the bundled ones, and architectures (`Transformer.random(PRESETS[name])`)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagd.models.config import ModelConfig

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def _model(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_codes: int,
    grid: tuple[int, int],
    head_dim: int = 128,
    num_action_ids: int = 0,
    **fields: Any,
) -> ModelConfig:
    """Describe a model; its keys have as many heads as its queries unless `fields` override it."""
    num_heads = hidden_size // head_dim
    fields.setdefault("num_kv_heads", num_heads)
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        vocab_size=num_codes + num_action_ids,
        image_vocab_size=num_codes,
        grid_height=grid[0],
        grid_width=grid[1],
        **fields,
    )


_DOOM: dict[str, Any] = {"num_action_ids": 6, "num_action_tokens": 1, "bias": True}
_DOOM |= {"position": "rope3d", "rope_theta": 100.0, "rope_step": math.pi}
_DOOM |= {"max_positions": 8 * (14 * 24 + 1) - 1}  # 8 frames, the first without an action
# World models of 0.8 to 42 million weights, from which `diagd train` chooses.
WORLD_SIZES = {
    f"mc-ar-{width}x{depth}": _model(
        width, width * 14 // 5 // 64 * 64, depth, 1024, (14, 24), 64, **_DOOM
    )
    for width, depth in ((128, 3), (192, 4), (256, 5), (320, 6), (448, 8), (576, 10))
}
_GPT: dict[str, Any] = {"norm": "layer", "mlp": "gelu", "bias": True, "position": "learned"}
# Buttons and stick axes of a gamepad, one token each; 10 frames.
_WHAM = _GPT | {"num_action_ids": 68, "num_action_tokens": 16, "tie_embeddings": True}
_WHAM |= {"max_positions": 10 * (18 * 30 + 16)}
WHAM = {
    "wham-200m": _model(1024, 4096, 16, 16384, (18, 30), 64, norm_affine=False, **_WHAM),
    "wham-1.6b": _model(2304, 9216, 24, 16384, (18, 30), **_WHAM),
}
_COSMOS: dict[str, Any] = {"num_kv_heads": 8, "max_positions": 5 * 40 * 64, "qk_norm": True}
_COSMOS |= {"position": "rope3d", "rope_theta": 500000.0}
_COSMOS_4B = _model(4096, 14336, 16, 64000, (40, 64), **_COSMOS)
_COSMOS_12B = replace(_COSMOS_4B, hidden_size=5120, num_layers=40, yarn_factor=2.0)
# Video2World: a token before the first frame, and a text of width 1,024.
_TEXT = {"max_positions": _COSMOS_4B.max_positions + 1, "prefix_length": 1}
_TEXT |= {"extra_embeddings": 64, "context_size": 1024, "position_table": True}
COSMOS = {
    "cosmos-4b": _COSMOS_4B,
    "cosmos-5b": replace(_COSMOS_4B, **_TEXT),
    "cosmos-12b": _COSMOS_12B,
    "cosmos-13b": replace(_COSMOS_12B, **_TEXT),
}
# Seven buttons and a camera turn, between two markers; 16 frames.
_MINEWORLD = {"num_action_ids": 70, "num_action_tokens": 11, "max_positions": 16 * (14 * 24 + 11)}
_300M = _model(1024, 4096, 20, 8192, (14, 24), 64, num_kv_heads=4, **_MINEWORLD)
_42M = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 8, "vocab_size": 8448}
MINEWORLD = {
    "mc-ar-42m": replace(_300M, **_42M, num_heads=8, num_kv_heads=8),
    "mc-ar-300m": _300M,
    "mc-ar-700m": replace(_300M, hidden_size=2048, num_heads=32),
    "mc-ar-1.2b": replace(_300M, hidden_size=2048, intermediate_size=8192, num_heads=32),
}
# Codes, and all buttons of an Atari; 20 frames.
_IRIS = _GPT | {"mlp": "exact_gelu", "num_action_ids": 18, "num_action_tokens": 1}
_IRIS |= {"max_positions": 20 * (4 * 4 + 1)}
IRIS = {"iris": _model(256, 1024, 10, 512, (4, 4), 64, head_size=256, **_IRIS)}
# After a class, one of a thousand or none; the two small ones were also released for 384 px.
_CLASS: dict[str, Any] = {"num_action_ids": 1001, "num_action_tokens": 1, "position": "rope2d"}
LLAMAGEN = {
    "llamagen-b": _model(768, 2048, 12, 16384, (16, 16), 64, max_positions=257, **_CLASS),
    "llamagen-l": _model(1024, 2816, 24, 16384, (16, 16), 64, max_positions=257, **_CLASS),
    "llamagen-xl": _model(1280, 3584, 36, 16384, (24, 24), 64, max_positions=577, **_CLASS),
    "llamagen-xxl": _model(1536, 4096, 48, 16384, (24, 24), 64, max_positions=577, **_CLASS),
    "llamagen-3b": _model(3200, 8704, 24, 16384, (24, 24), 100, max_positions=577, **_CLASS),
}
# After the 120 places of a text, or of none.
_PLACES: dict[str, Any] = {"prefix_length": 120, "extra_embeddings": 240, "position": "rope2d"}
LLAMAGEN_T2I = {
    "llamagen-t2i-256": _model(1280, 3584, 36, 16384, (16, 16), 64, max_positions=376, **_PLACES),
    "llamagen-t2i-512": _model(1280, 3584, 36, 16384, (32, 32), 64, max_positions=1144, **_PLACES),
}
_WORDS: dict[str, Any] = {"extra_embeddings": 102400, "max_positions": 16384, "norm_eps": 1e-6}
JANUS = {
    "janus-pro-1b": _model(2048, 5632, 24, 16384, (24, 24), head_size=2048, **_WORDS),
    "janus-pro-7b": _model(4096, 11008, 30, 16384, (24, 24), head_size=4096, **_WORDS),
}
_CHAMELEON: dict[str, Any] = {"extra_embeddings": 65536, "max_positions": 4096}
_CHAMELEON |= {"norm_eps": 1e-5, "qk_norm": True, "head_norm": True}
CHAMELEON = {"chameleon-7b": _model(4096, 11008, 32, 8192, (32, 32), **_CHAMELEON)}
# With the codes the row separator, an extra column; 184,622 ids in all.
_EMU3: dict[str, Any] = {"extra_embeddings": 184622 - 32769, "max_positions": 9216}
_EMU3 |= {"prefix_length": 1, "num_kv_heads": 8, "rope_theta": 1e6}
EMU3 = {"emu3": _model(4096, 14336, 32, 32769, (90, 91), **_EMU3)}
# As in Emu3; 282,926 ids in all.
_EMU35 = _EMU3 | {"extra_embeddings": 282926 - 131073, "max_positions": 32768, "qk_norm": True}
EMU35 = {"emu3.5": replace(_model(5120, 25600, 64, 131073, (55, 74), **_EMU35), num_heads=64)}
_GLM: dict[str, Any] = {"extra_embeddings": 168064 - 16512, "max_positions": 131072}
_GLM |= {"num_kv_heads": 2, "bias": True, "post_norms": True, "num_action_ids": 128}
_GLM |= {"position": "mrope", "rotary_sections": (8, 12, 12)}
GLM_IMAGE = {"glm-image-9b": _model(4096, 13696, 40, 16384, (32, 32), **_GLM)}
# With the codes what else is drawn in no picture: 32,800 ids of a second embedding table.
_MAMMOTH: dict[str, Any] = {"num_action_ids": 32800 - 16385, "norm_eps": 1e-6, "rope_theta": 5e6}
_MAMMOTH |= {"visual_mlp_layers": (*range(18, 36),), "num_kv_heads": 8, "qk_norm": True}
_MAMMOTH |= {"extra_embeddings": 151936, "max_positions": 128000}
_PREVIEW = _MAMMOTH | {"rope_theta": 1e6, "visual_mlp_layers": (*range(14, 28),), "bias": True}
_PREVIEW |= {"num_kv_heads": 4, "qk_norm": False, "extra_embeddings": 152064}
_PREVIEW |= {"max_positions": 32768}
MAMMOTHMODA2 = {
    "mammothmoda2-preview": _model(3584, 18944, 28, 16385, (32, 33), **_PREVIEW),
    "mammothmoda2-dev": _model(4096, 12288, 36, 16385, (32, 33), **_MAMMOTH),
}
PRESETS: dict[str, ModelConfig] = {
    "mc-ar-doom": WORLD_SIZES["mc-ar-320x6"],  # the bundled world model
    "mc-ar-doom-small": WORLD_SIZES["mc-ar-192x4"],  # beside it, to compare sizes
}
PRESETS |= WORLD_SIZES | WHAM | COSMOS | MINEWORLD | IRIS
PRESETS |= LLAMAGEN | LLAMAGEN_T2I | JANUS | CHAMELEON | EMU3 | EMU35 | GLM_IMAGE | MAMMOTHMODA2


def available_models() -> list[str]:
    """Return the names of the bundled models, for `load_model`."""
    return sorted(path.parent.name for path in ASSETS.glob("*/model.safetensors"))
