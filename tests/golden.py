"""Golden files of tokenizers: tiny random weights, and what the original code makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from diagd.families.wham.tokenizer import WHAMTokenizer, wham_tokenizer_from_weights

FIXTURES = Path(__file__).resolve().parent / "fixtures"
MINEWORLD = FIXTURES / "mineworld_tiny_v256"
WHAM_NAMES = ("wham_tiny", "wham_tiny_v2")

every_wham = pytest.mark.parametrize("name", WHAM_NAMES)


def golden(path: str) -> dict[str, Tensor]:
    """Read a golden file, named from the fixtures' folder."""
    return load_file(FIXTURES / path)


def wham_config(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def wham_weights(name: str) -> dict[str, Tensor]:
    """Return the tokenizer's part of a WHAM state dict."""
    return load_file(FIXTURES / name / "tokenizer.safetensors")


def wham_tokenizer(name: str) -> WHAMTokenizer:
    config = wham_config(name)
    return wham_tokenizer_from_weights(
        wham_weights(name), config["image_height"], config["image_width"], config["vq_head_size"]
    )


def wham_frames(name: str, key: str = "images_u8") -> Tensor:
    """Return golden pictures as (T, H_px, W_px, 3) uint8, both clips in a row."""
    pictures = golden(f"{name}/golden_tokenizer.safetensors")[key]
    return pictures.flatten(0, 1).movedim(1, -1).contiguous()
