"""How close two videos are, frame by frame: PSNR and SSIM, through torchmetrics."""

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure


def psnr(video: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each frame, in dB (100 for equal frames).

    Args:
        video, reference: (..., H_px, W_px, 3) uint8.

    Returns:
        (...) float64.
    """
    check_videos(video, reference)
    error = (video.double() - reference.double()).square().mean(dim=(-3, -2, -1))
    return (10 * torch.log10(255**2 / error)).clamp(max=100)


def ssim(video: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity of each frame (Gaussian window of 11 px, sigma 1.5).

    Args:
        video, reference: (..., H_px, W_px, 3) uint8.

    Returns:
        (...) float32, 1 for equal frames.
    """
    check_videos(video, reference)
    images = [v.reshape(-1, *v.shape[-3:]).movedim(-1, 1).float() / 255 for v in (video, reference)]
    value = structural_similarity_index_measure(
        images[0], images[1], data_range=1.0, reduction="none"
    )
    assert isinstance(value, Tensor)
    return value.view(video.shape[:-3])


def check_videos(video: Tensor, reference: Tensor) -> None:
    """Raise ValueError unless two videos are uint8 and of one shape."""
    if video.shape != reference.shape or {video.dtype, reference.dtype} != {torch.uint8}:
        raise ValueError(
            f"videos must be uint8 of one shape, got {video.dtype} {tuple(video.shape)} "
            f"and {reference.dtype} {tuple(reference.shape)}"
        )
