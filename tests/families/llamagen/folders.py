"""LlamaGen in miniature as it is released: random weights, images of 2 x 2 tokens."""

import json
from pathlib import Path

import torch

from tests.families.llamagen.plain import random_checkpoint, random_tokenizer

HIDDEN, LAYERS, HEADS, NUM_CODES, SIDE = 64, 1, 1, 40, 2


def write_llamagen(folder: Path) -> Path:
    """Write a model, and its tokenizer beside it; return the model's file."""
    folder.mkdir(exist_ok=True)
    torch.save({"model": random_checkpoint(HIDDEN, LAYERS, NUM_CODES)}, folder / "c2i_B_256.pt")
    tokenizer = random_tokenizer((32,) * 5, latent_channels=16, num_codes=NUM_CODES, code_size=8)
    torch.save({"model": tokenizer}, folder / "vq_ds16_c2i.pt")
    (folder / "config.json").write_text(json.dumps({"image_size": 16 * SIDE}))
    return folder / "c2i_B_256.pt"
