import numpy as np
import pytest
import torch

from diagd.metrics.quality import distinct_tokens, repeated_tokens, sharpness
from tests.worlds import smooth_frames


def test_sharpness_is_the_variance_of_the_laplacian_pixel_by_pixel():
    frames = smooth_frames(2, 6, 9)
    for frame, value in zip(frames.numpy().astype(float), sharpness(frames), strict=True):
        luma = 0.299 * frame[..., 0] + 0.587 * frame[..., 1] + 0.114 * frame[..., 2]
        laplacian = [
            luma[i - 1, j] + luma[i + 1, j] + luma[i, j - 1] + luma[i, j + 1] - 4 * luma[i, j]
            for i in range(1, 5)
            for j in range(1, 8)
        ]
        assert value.item() == pytest.approx(np.var(laplacian), rel=1e-9)


def test_a_blurred_frame_is_less_sharp_and_a_plain_one_not_at_all():
    frame = torch.randint(256, (1, 8, 12, 3), generator=torch.Generator().manual_seed(0)).byte()
    blurred = (frame.float() + frame.roll(1, 1).float() + frame.roll(1, 2).float()) / 3
    assert 0 < sharpness(blurred.byte()) < sharpness(frame)
    assert sharpness(torch.full((1, 8, 12, 3), 90, dtype=torch.uint8)).item() == pytest.approx(0)


def test_shares_of_tokens_are_counted_frame_by_frame():
    grids = torch.tensor([[[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 9, 9]], [[7] * 3, [7] * 3]])
    assert repeated_tokens(grids).tolist() == [0.5, 0]
    assert distinct_tokens(grids).tolist() == pytest.approx([1, 4 / 6, 1 / 6])
