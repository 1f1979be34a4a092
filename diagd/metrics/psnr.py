"""PSNR, which needs no extra."""

import torch
from torch import Tensor


def psnr(video: Tensor, reference: Tensor) -> Tensor:
    """PSNR of each frame in dB, at most 100: two (..., H_px, W_px, 3) uint8 -> (...) float64."""
    error = (video.double() - reference.double()).square().mean(dim=(-3, -2, -1))
    return (10 * torch.log10(255**2 / error)).clamp(max=100)
