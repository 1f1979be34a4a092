"""A detector with StyleGAN-V's calling convention, small enough for tests.

Features are the mean of each channel over the first and the second half of the clip, and over the
left half of the frames: enough to see order, scale and cropping.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional


class TinyDetector(torch.nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        assert return_features
        if resize:
            n, c, t, h, w = x.shape
            x = x.transpose(1, 2).reshape(n * t, c, h, w)
            x = functional.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
            x = x.reshape(n, t, c, 224, 224).transpose(1, 2)
        if rescale:
            x = x / 127.5 - 1
        half = x.shape[2] // 2
        parts = [x[:, :, :half], x[:, :, half:], x[..., : x.shape[-1] // 2]]
        return torch.cat([part.mean(dim=[2, 3, 4]) for part in parts], dim=1)


class TinyInception(torch.nn.Module):
    """In the calling convention of StyleGAN2-ADA: the mean of each channel, in either half."""

    def forward(self, x: Tensor, return_features: bool) -> Tensor:
        assert return_features
        assert x.dtype == torch.uint8
        half = x.shape[3] // 2
        parts = [x[..., :half].float(), x[..., half:].float()]
        return torch.cat([part.mean(dim=[2, 3]) for part in parts], dim=1)


def write_detector(path: Path, detector: type[torch.nn.Module] = TinyDetector) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and what the file is made of
        torch.jit.save(torch.jit.script(detector()), str(path))
    return path
