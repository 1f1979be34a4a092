import numpy as np
import torch

from diagd.metrics.quality import frame_features


def test_a_frame_is_mean_spread_and_change_of_each_channel():
    latents = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    values = latents.double().numpy()
    expected = [
        [
            *(values[t, c].mean() for c in range(2)),
            *(values[t, c].std() for c in range(2)),
            *(np.abs(values[t, c] - values[t - 1, c]).mean() for c in range(2)),
        ]
        for t in (1, 2, 3)
    ]
    features = frame_features(latents)
    assert features.dtype == torch.float32
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-5, atol=1e-6)
