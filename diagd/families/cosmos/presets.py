"""The shapes of Cosmos-Predict1's autoregressive models: 4B and 12B, 5B and 13B with text."""

import math
from dataclasses import replace

from diagd.models.config import ModelConfig

LEVELS = (8, 8, 8, 5, 5, 5)  # of the tokenizer's codes
CODEBOOK_SIZE = math.prod(LEVELS)  # 64000
COMPRESSION, TEMPORAL_COMPRESSION = 16, 8  # pixels a token, frames a grid after the first
HEIGHT_PX, WIDTH_PX = 640, 1024  # what the released models were trained on
WINDOW = 33  # frames
WINDOW_GRIDS = 1 + (WINDOW - 1) // TEMPORAL_COMPRESSION
LATENT_SHAPE = (WINDOW_GRIDS, HEIGHT_PX // COMPRESSION, WIDTH_PX // COMPRESSION)  # T, H, W
YARN_FACTOR = 2.0  # of the models that were trained with YaRN

_4B = ModelConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=CODEBOOK_SIZE,
    image_vocab_size=CODEBOOK_SIZE,
    max_positions=math.prod(LATENT_SHAPE),
    grid_height=LATENT_SHAPE[1],
    grid_width=LATENT_SHAPE[2],
    qk_norm=True,
    position="rope3d",
    rope_theta=500000.0,
)
_12B = replace(_4B, hidden_size=5120, num_layers=40, yarn_factor=YARN_FACTOR)
_TEXT = {"max_positions": _4B.max_positions + 1, "prefix_length": 1, "extra_embeddings": 64}
_TEXT |= {"context_size": 1024, "position_table": True}
PRESETS = {
    "cosmos-4b": _4B,
    "cosmos-5b": replace(_4B, **_TEXT),
    "cosmos-12b": _12B,
    "cosmos-13b": replace(_12B, **_TEXT),
}
