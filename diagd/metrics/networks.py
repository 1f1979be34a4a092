"""I3D and EfficientNet-Lite0 as TensorFlow computes them, for inference.

Parameters have the names and shapes of the published files except for separators, so that a file of
another network is detected. I3D: arXiv:1705.07750, figure 3; its 400 logits on Kinetics are the
features of FVD (arXiv:1812.01717). EfficientNet: arXiv:1905.11946, in its Lite form (ReLU6, no
squeeze-and-excitation).
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = 1e-3  # batch normalization in both networks


def pad_same(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Pad (N, C, ...) with zeros as in SAME: ceil(size / stride) outputs, odd zero at the end."""
    padding = list[int]()
    for size, taps, step in zip(x.shape[2:], kernel, stride, strict=True):
        total = max((math.ceil(size / step) - 1) * step + taps - size, 0)
        padding = [total // 2, total - total // 2, *padding]  # the last axis comes first
    return functional.pad(x, padding)


def _max_pool(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    # inputs come from a ReLU, so padding with zero equals minus infinity
    return functional.max_pool3d(pad_same(x, kernel, stride), tuple(kernel), tuple(stride))


class _Unit(nn.Module):
    """Convolution, batch normalization without a scale, ReLU."""

    def __init__(self, channels: int, out: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self._size, self._stride = (size,) * 3, (stride,) * 3
        self.kernel = nn.Parameter(torch.empty(size, size, size, channels, out))  # T, H, W
        self.mean, self.var = (nn.Parameter(torch.empty(1, 1, 1, 1, out)) for _ in range(2))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.var + _EPSILON).rsqrt()
        weight = (self.kernel * scale).permute(4, 3, 0, 1, 2)
        bias = self.bias - (self.mean * scale).flatten()
        return functional.conv3d(
            pad_same(x, self._size, self._stride), weight, bias, self._stride
        ).relu()


class _Mixed(nn.ModuleDict):
    """Four parallel branches: 1x1x1, two with 3x3x3 after a narrow 1x1x1, and a pooling."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        one, narrow, wide, narrower, less, pooled = widths
        super().__init__(
            {
                "Branch_0": nn.ModuleDict({"Conv3d_0a_1x1": _Unit(channels, one, 1)}),
                "Branch_1": nn.ModuleDict(
                    {
                        "Conv3d_0a_1x1": _Unit(channels, narrow, 1),
                        "Conv3d_0b_3x3": _Unit(narrow, wide, 3),
                    }
                ),
                "Branch_2": nn.ModuleDict(
                    {
                        "Conv3d_0a_1x1": _Unit(channels, narrower, 1),
                        "Conv3d_0b_3x3": _Unit(narrower, less, 3),
                    }
                ),
                "Branch_3": nn.ModuleDict({"Conv3d_0b_1x1": _Unit(channels, pooled, 1)}),
            }
        )
        self.width = one + wide + less + pooled

    def forward(self, x: Tensor) -> Tensor:
        branches = []
        for name, units in self.items():
            part = _max_pool(x, (3, 3, 3), (1, 1, 1)) if name == "Branch_3" else x
            for unit in units.children():
                part = unit(part)
            branches.append(part)
        return torch.cat(branches, 1)


class _Head(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(1, 1, 1, channels, classes))
        self.bias = nn.Parameter(torch.empty(classes))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel[0, 0, 0] + self.bias


class I3d(nn.ModuleDict):
    """Inception-I3D on Kinetics-400: (N, 3, T, 224, 224) in [-1, 1] -> (N, 400) logits."""

    STEM = 64, 64, 192
    MIXED: ClassVar = {  # channels of the six units, by name
        "3b": (64, 96, 128, 16, 32, 32),
        "3c": (128, 128, 192, 32, 96, 64),
        "4b": (192, 96, 208, 16, 48, 64),
        "4c": (160, 112, 224, 24, 64, 64),
        "4d": (128, 128, 256, 24, 64, 64),
        "4e": (112, 144, 288, 32, 64, 64),
        "4f": (256, 160, 320, 32, 128, 128),
        "5b": (256, 160, 320, 32, 128, 128),
        "5c": (384, 192, 384, 48, 128, 128),
    }
    # pooling before a unit: frames and pixels of its window, and its stride
    POOLED: ClassVar = {
        "Conv3d_2b_1x1": ((1, 3, 3), (1, 2, 2)),
        "Mixed_3b": ((1, 3, 3), (1, 2, 2)),
        "Mixed_4b": ((3, 3, 3), (2, 2, 2)),
        "Mixed_5b": ((2, 2, 2), (2, 2, 2)),
    }

    def __init__(self) -> None:
        super().__init__()
        first, second, width = self.STEM
        self["Conv3d_1a_7x7"] = _Unit(3, first, 7, stride=2)
        self["Conv3d_2b_1x1"] = _Unit(first, second, 1)
        self["Conv3d_2c_3x3"] = _Unit(second, width, 3)
        for name, widths in self.MIXED.items():
            self[f"Mixed_{name}"] = mixed = _Mixed(width, widths)
            width = mixed.width
        self["Logits"] = nn.ModuleDict({"Conv3d_0c_1x1": _Head(width, 400)})

    def forward(self, video: Tensor) -> Tensor:
        x = video
        *body, (_, logits) = self.items()
        for name, unit in body:
            if name in self.POOLED:
                x = _max_pool(x, *self.POOLED[name])
            x = unit(x)
        # the mean of logits over frames equals the logits of the mean: the last layer is linear
        pooled = functional.avg_pool3d(x, (2, 7, 7), 1).mean((2, 3, 4))
        return logits.get_submodule("Conv3d_0c_1x1")(pooled)


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.running_mean, self.running_var = (
            nn.Parameter(torch.empty(channels)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=_EPSILON
        )


class _SameConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(pad_same(input, self.kernel_size, self.stride))


def _conv(channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> _SameConv:
    return _SameConv(channels, out, kernel, stride, groups=groups, bias=False)


class _Block(nn.Module):
    """Inverted bottleneck: expand, filter each channel, project."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = channels * expand
        self._adds = stride == 1 and channels == out
        self._expands = expand > 1
        if self._expands:
            self.expand_conv, self.bn0 = _conv(channels, wide), _Norm(wide)
        self.depthwise_conv, self.bn1 = _conv(wide, wide, kernel, stride, groups=wide), _Norm(wide)
        self.project_conv, self.bn2 = _conv(wide, out), _Norm(out)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.relu6(self.bn0(self.expand_conv(x))) if self._expands else x
        wide = functional.relu6(self.bn1(self.depthwise_conv(wide)))
        projected = self.bn2(self.project_conv(wide))
        return x + projected if self._adds else projected


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 on ImageNet: (N, 3, H, W), (pixels - 127) / 128 -> (N, 1280) features."""

    STEM, HEAD = 32, 1280
    # blocks, kernel, stride of the first, expansion, channels
    STAGES = (
        *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
        *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = _conv(3, self.STEM, 3, stride=2), _Norm(self.STEM)
        self.blocks, width = nn.ModuleList(), self.STEM
        for count, kernel, stride, expand, out in self.STAGES:
            for place in range(count):
                self.blocks.append(_Block(width, out, kernel, 1 if place else stride, expand))
                width = out
        self.conv_head, self.bn1 = _conv(width, self.HEAD), _Norm(self.HEAD)
        self.fc = nn.Linear(self.HEAD, 1000)  # unused, but in the file

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self.bn0(self.conv_stem(x)))
        for block in self.blocks:
            x = block(x)
        return functional.relu6(self.bn1(self.conv_head(x))).mean((2, 3))
