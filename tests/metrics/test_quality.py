import math

import numpy as np
import pytest
import torch

from diagd.metrics.quality import psnr, ssim
from tests.worlds import smooth_frames


def noisy(frames: torch.Tensor, sigma: float) -> torch.Tensor:
    noise = torch.randn(frames.shape, generator=torch.Generator().manual_seed(1)) * sigma
    return (frames + noise).round().clamp(0, 255).to(torch.uint8)


def ssim_by_the_formula(video: np.ndarray, reference: np.ndarray) -> float:
    """Wang et al. 2004 on one (H_px, W_px, 3) frame, written out window by window.

    Mean over a window about every pixel (beyond the border the frame is mirrored) and the channels.
    """
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = np.outer(window, window) / window.sum() ** 2
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for row in range(video.shape[0]):
        for column in range(video.shape[1]):
            for channel in range(3):
                p, q = (
                    np.pad(image[..., channel].astype(float), 5, mode="reflect")[
                        row : row + 11, column : column + 11
                    ]
                    for image in (video, reference)
                )
                mean_p, mean_q = (window * p).sum(), (window * q).sum()
                var_p = (window * (p - mean_p) ** 2).sum()
                var_q = (window * (q - mean_q) ** 2).sum()
                covariance = (window * (p - mean_p) * (q - mean_q)).sum()
                values.append(
                    (2 * mean_p * mean_q + c1)
                    * (2 * covariance + c2)
                    / ((mean_p**2 + mean_q**2 + c1) * (var_p + var_q + c2))
                )
    return float(np.mean(values))


def test_psnr_is_the_formula_frame_by_frame():
    reference = smooth_frames(2, 16, 24)
    video = noisy(reference, 9.0)
    video[1] = reference[1]
    video[1, 3, 4, 2] ^= 16  # one channel of one pixel is off by 16
    errors = ((video.numpy().astype(float) - reference.numpy()) ** 2).mean(axis=(1, 2, 3))
    expected = [10 * math.log10(255**2 / error) for error in errors]
    assert psnr(video, reference).tolist() == pytest.approx(expected, rel=1e-12)
    assert expected[1] == pytest.approx(10 * math.log10(255**2 / (256 / (16 * 24 * 3))))


def test_equal_frames_have_a_psnr_of_100_and_an_ssim_of_1():
    frames = smooth_frames(2, 16, 24)
    assert psnr(frames, frames).tolist() == [100, 100]
    assert ssim(frames, frames).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_ssim_is_the_formula():
    reference = smooth_frames(2, 14, 21)
    video = torch.stack([noisy(reference[0], 12.0), reference[1].flip(1)])
    expected = [
        ssim_by_the_formula(v, r) for v, r in zip(video.numpy(), reference.numpy(), strict=True)
    ]
    # float32 sums of squares of values in [0, 1] lose about 1e-6 where a window is flat
    assert ssim(video, reference).tolist() == pytest.approx(expected, abs=1e-4)
    assert expected[0] > expected[1]


@pytest.mark.parametrize("metric", [psnr, ssim])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=["frame", "video", "videos"])
def test_leading_dimensions_are_kept(metric, leading):
    frames = smooth_frames(6, 16, 24)
    reference = frames[: max(1, math.prod(leading))].view(*leading, 16, 24, 3)
    values = metric(noisy(reference, 5.0), reference)
    assert values.shape == leading
    first = metric(noisy(reference, 5.0).view(-1, 16, 24, 3), reference.view(-1, 16, 24, 3))
    assert values.flatten().tolist() == first.tolist()
