"""What tokenizers take and give: frames of uint8 RGB, grids of ids, and the numbers in between."""

from typing import Literal, get_args

import torch
from torch import Tensor

PixelRounding = Literal["nearest", "down"]
BATCH_SIZE = 8  # frames encoded or decoded at once


def check_frames(frames: Tensor, compression: int) -> None:
    """Raise ValueError unless frames are (T, H_px, W_px, 3) uint8 of multiples of `compression`."""
    if frames.dim() != 4 or frames.shape[-1] != 3 or not frames.numel():
        raise ValueError(f"frames must be (T, H_px, W_px, 3), got {tuple(frames.shape)}")
    if frames.dtype != torch.uint8:
        raise ValueError(f"frames must be uint8, got {frames.dtype}")
    height_px, width_px = frames.shape[1:3]
    if height_px % compression or width_px % compression:
        raise ValueError(
            f"frame height and width must be multiples of {compression} px, "
            f"got {height_px}x{width_px}"
        )


def check_tokens(tokens: Tensor, codebook_size: int) -> None:
    """Raise ValueError unless tokens are (T, height, width) integers in [0, codebook_size)."""
    if tokens.dim() != 3 or not tokens.numel():
        raise ValueError(f"tokens must be (T, height, width), got {tuple(tokens.shape)}")
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= codebook_size:
        raise ValueError(
            f"tokens must be in [0, codebook_size={codebook_size}), got {low} to {high}"
        )


def check_rounding(rounding: str) -> None:
    """Raise ValueError unless `paint` knows the rule."""
    if rounding not in get_args(PixelRounding):
        known = " or ".join(get_args(PixelRounding))
        raise ValueError(f"pixel_rounding must be {known}, got {rounding!r}")


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError unless at least one frame is handled at once."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def normalise(frames: Tensor) -> Tensor:
    """Scale to what the models see: (T, H_px, W_px, 3) uint8 -> (T, 3, H_px, W_px) in [-1, 1]."""
    return frames.movedim(-1, 1).float() / 127.5 - 1


def paint(levels: Tensor, rounding: PixelRounding) -> Tensor:
    """Make pixels: (T, 3, H_px, W_px) about [0, 255] -> (T, H_px, W_px, 3) uint8, contiguous.

    Args:
        rounding: "nearest"; or "down", as the code of MineWorld, Cosmos and WHAM does.
    """
    levels = levels.round() if rounding == "nearest" else levels.floor()
    return levels.clamp(0, 255).to(torch.uint8).movedim(1, -1).contiguous()
