"""What a long dream loses, frame by frame, where no true frame is left to compare it with.

Pictures blur or break up, which `sharpness` shows; they freeze, so tokens repeat those of the frame
before; or they end in a few textures, so a frame has few distinct tokens. None of these numbers is
good or bad by itself: they are read against those of true frames.
"""

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def sharpness(frames: Tensor) -> Tensor:
    """Return the variance of the Laplacian of each frame's luma (Pech-Pacheco et al. 2000).

    The Laplacian is a pixel's four neighbours minus four times the pixel; border pixels have none.

    Args:
        frames: (T, H_px, W_px, 3) uint8.

    Returns:
        (T,) float64, 0 for a frame of one colour.
    """
    luma = frames.double() @ torch.tensor(LUMA, dtype=torch.float64, device=frames.device)
    beside = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:]
    above_and_below = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1]
    laplacian = beside + above_and_below - 4 * luma[:, 1:-1, 1:-1]
    return laplacian.var(dim=(1, 2), correction=0)


def repeated_tokens(grids: Tensor) -> Tensor:
    """Return the share of tokens equal to the frame before's at the same place.

    Args:
        grids: (T, height, width) integers, the frame before the first one first.

    Returns:
        (T - 1,) float64.
    """
    return (grids[1:] == grids[:-1]).double().mean(dim=(1, 2))


def distinct_tokens(grids: Tensor) -> Tensor:
    """Return how many different ids a frame has, as a share of its tokens.

    Args:
        grids: (T, height, width) integers.

    Returns:
        (T,) float64; a frame of one id has 1 / (height * width).
    """
    counts = [len(grid.unique()) for grid in grids]
    return torch.tensor(counts, dtype=torch.float64) / grids[0].numel()
