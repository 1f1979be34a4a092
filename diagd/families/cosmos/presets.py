"""The shapes of Cosmos-Predict1's autoregressive models: 4B and 12B, 5B and 13B with text."""

import math

from diagd.models.config import ModelConfig

LEVELS = (8, 8, 8, 5, 5, 5)  # of the tokenizer's codes
CODEBOOK_SIZE = math.prod(LEVELS)  # 64000
COMPRESSION, TEMPORAL_COMPRESSION = 16, 8  # pixels a token, frames a grid after the first
HEIGHT_PX, WIDTH_PX = 640, 1024  # what the released models were trained on
WINDOW = 33  # frames
WINDOW_GRIDS = 1 + (WINDOW - 1) // TEMPORAL_COMPRESSION
LATENT_SHAPE = (WINDOW_GRIDS, HEIGHT_PX // COMPRESSION, WIDTH_PX // COMPRESSION)  # T, H, W
YARN_FACTOR = 2.0  # of the models that were trained with YaRN


def _cosmos(hidden_size: int, num_layers: int, yarn_factor: float, has_text: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=14336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=CODEBOOK_SIZE,
        image_vocab_size=CODEBOOK_SIZE,
        max_positions=math.prod(LATENT_SHAPE) + has_text,
        grid_height=LATENT_SHAPE[1],
        grid_width=LATENT_SHAPE[2],
        qk_norm=True,
        position="rope3d",
        rope_theta=500000.0,
        yarn_factor=yarn_factor,
        prefix_length=1 if has_text else 0,
        extra_embeddings=64 if has_text else 0,
        context_size=1024 if has_text else 0,
        position_table=has_text,
    )


PRESETS = {
    "cosmos-4b": _cosmos(4096, 16, yarn_factor=1.0, has_text=False),
    "cosmos-5b": _cosmos(4096, 16, yarn_factor=1.0, has_text=True),
    "cosmos-12b": _cosmos(5120, 40, yarn_factor=YARN_FACTOR, has_text=False),
    "cosmos-13b": _cosmos(5120, 40, yarn_factor=YARN_FACTOR, has_text=True),
}
