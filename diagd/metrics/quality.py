"""Frame metrics: PSNR and SSIM against a reference, sharpness, tokens, and features for TFD."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def likeness(
    video: Tensor,
    reference: Tensor,
    learned: Mapping[str, Callable[[Tensor, Tensor], Tensor] | None],
) -> dict[str, list[float]]:
    """Return PSNR and SSIM of each frame, and learned distances with installed weights."""
    metrics = {"psnr": psnr, "ssim": ssim, **learned}
    return {name: one(video, reference).tolist() for name, one in metrics.items() if one}


def psnr(video: Tensor, reference: Tensor) -> Tensor:
    """PSNR of each frame in dB, at most 100: two (..., H_px, W_px, 3) uint8 -> (...) float64."""
    error = (video.double() - reference.double()).square().mean(dim=(-3, -2, -1))
    return (10 * torch.log10(255**2 / error)).clamp(max=100)


def ssim(video: Tensor, reference: Tensor) -> Tensor:
    """SSIM of each frame (Gaussian window of 11 px, sigma 1.5): as `psnr`, but float32."""
    # an extra that the other metrics do not need
    from torchmetrics.functional.image import structural_similarity_index_measure

    both = video, reference
    ours, theirs = (v.reshape(-1, *v.shape[-3:]).movedim(-1, 1).float() / 255 for v in both)
    value = structural_similarity_index_measure(ours, theirs, data_range=1.0, reduction="none")
    assert isinstance(value, Tensor)
    return value.view(video.shape[:-3])


LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def sharpness(frames: Tensor) -> Tensor:
    """Return the variance of the Laplacian of each frame's luma (Pech-Pacheco et al. 2000).

    (T, H_px, W_px, 3) uint8 -> (T,) float64, 0 for a frame of one colour.
    """
    luma = frames.double() @ torch.tensor(LUMA, dtype=torch.float64, device=frames.device)
    beside = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    above_and_below = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1]
    laplacian = beside + above_and_below - 4 * luma[:, 1:-1, 1:-1]
    return laplacian.var(dim=(1, 2), correction=0)


def repeated_tokens(grids: Tensor) -> Tensor:
    """Return the share of tokens equal to the previous frame's: (T, height, width) -> (T - 1,)."""
    return (grids[1:] == grids[:-1]).double().mean(dim=(1, 2))


def distinct_tokens(grids: Tensor) -> Tensor:
    """Return the share of distinct ids among a frame's tokens: (T, height, width) -> (T,)."""
    counts = [len(grid.unique()) for grid in grids]
    return torch.tensor(counts, dtype=torch.float64) / grids[0].numel()


def frame_features(latents: Tensor) -> Tensor:
    """Return mean, spread and change of each channel after the first frame: -> (T - 1, 3 C)."""
    latents = latents.float()
    now, before = latents[1:], latents[:-1]
    spread = now.std(dim=(2, 3), correction=0)
    change = (now - before).abs().mean(dim=(2, 3))
    return torch.cat([now.mean(dim=(2, 3)), spread, change], dim=1)
