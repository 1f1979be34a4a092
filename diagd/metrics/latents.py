"""Features of frames in a tokenizer's own latents, for the tokenizer Frechet distance (TFD).

TFD is not FVD and not comparable with it, nor between tokenizers: it stands in where no I3D weights
are at hand. A frame is described by 3 C numbers, C being the latent channels of the tokenizer's
encoder (before rounding to codes): over the places of the frame, each channel's mean, its standard
deviation, and the mean absolute change since the frame before. TFD is the Frechet distance between
all frames of all clips described so, generated against real. The last part makes it see motion.
"""

import torch
from torch import Tensor


def frame_features(latents: Tensor) -> Tensor:
    """Describe each frame after the first.

    Args:
        latents: (T, C, h, w), the frame before the clip first.

    Returns:
        (T - 1, 3 * C) float32.

    Raises:
        ValueError: another number of dimensions, or fewer than two frames.
    """
    if latents.ndim != 4 or len(latents) < 2:
        raise ValueError(f"latents must be (T, C, h, w), T at least 2, got {tuple(latents.shape)}")
    latents = latents.float()
    now, before = latents[1:], latents[:-1]
    spread = now.std(dim=(2, 3), correction=0)
    change = (now - before).abs().mean(dim=(2, 3))
    return torch.cat([now.mean(dim=(2, 3)), spread, change], dim=1)
