"""LPIPS: distance of two pictures in the features of a classifier (arXiv:1801.03924), from files.

Two files make the metric: the classifier's weights as torchvision saves them (AlexNet or VGG-16;
which one is seen from the shapes), and the linear heads of the authors (`alex.pth`, `vgg.pth`,
version 0.1; torchmetrics carries copies). No torchvision: its networks are written out here.

    distance = sum over layers of mean over places of sum over channels w_c (a_c - b_c)^2

where a and b are feature maps of unit length along the channels.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional

from diagd.finite import as_finite
from diagd.metrics.quality import check_videos
from diagd.metrics.weights import read_state_dict, short_sha256


class Convolution(NamedTuple):
    """One layer of a classifier: a pooling where `pool` is not 0, a convolution, a ReLU."""

    place: int  # in torchvision's `features`
    channels: int
    kernel: int
    stride: int = 1
    pool: int = 0  # kernel of a max pooling of stride 2 before it
    is_read: bool = True  # whether its feature map is compared


NETWORKS = {
    "alex": (
        Convolution(0, 64, 11, stride=4),
        Convolution(3, 192, 5, pool=3),
        Convolution(6, 384, 3, pool=3),
        Convolution(8, 256, 3),
        Convolution(10, 256, 3),
    ),
    "vgg": tuple(
        Convolution(first + 2 * i, width, 3, pool=2 if first and not i else 0, is_read=i == n - 1)
        for first, width, n in ((0, 64, 2), (5, 128, 2), (10, 256, 3), (17, 512, 3), (24, 512, 3))
        for i in range(n)
    ),
}
_MIN_PX = {"alex": 31, "vgg": 16}  # below, a pooling has nothing left
_PADDING = {11: 2, 5: 2, 3: 1}  # by kernel
_SHIFT = (-0.030, -0.088, -0.188)  # of pixels in [-1, 1], to what ImageNet classifiers see
_SCALE = (0.458, 0.448, 0.450)
_BATCH = 16  # frames at once; bounds the memory


class Lpips:
    """The metric of one pair of weight files.

    Attributes:
        provenance: the network and the short hash of each file.
    """

    def __init__(
        self,
        backbone: str | Path,
        heads: str | Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read the weights.

        Args:
            backbone: torchvision's state dict of `alexnet` or `vgg16`.
            heads: the authors' `alex.pth` or `vgg.pth`; None takes torchmetrics' copy.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a file that does not hold what it should.
        """
        weights = read_state_dict(backbone)
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        kinds: dict[tuple[int, ...], str] = {(64, 3, 11, 11): "alex", (64, 3, 3, 3): "vgg"}
        network = kinds.get(shapes.get("features.0.weight", ()))
        if network is None:
            raise ValueError(f"{backbone} must hold features.* of torchvision's alexnet or vgg16")
        self._layers = NETWORKS[network]
        self._kernels, channels = [], 3
        for layer in self._layers:
            name = f"features.{layer.place}"
            expected = (layer.channels, channels, layer.kernel, layer.kernel)
            for key, shape in ((f"{name}.weight", expected), (f"{name}.bias", expected[:1])):
                if shapes.get(key) != shape:
                    raise ValueError(f"{backbone}: {key} must be {shape}, got {shapes.get(key)}")
            keys = f"{name}.weight", f"{name}.bias"
            kernel = tuple(as_finite(weights[key], backbone, key, device) for key in keys)
            self._kernels.append(kernel)
            channels = layer.channels
        if heads is None:
            folder = Path(torchmetrics.__file__).parent / "functional" / "image" / "lpips_models"
            heads = folder / f"{network}.pth"
        self._heads = [head.to(device) for head in _read_heads(heads, self._layers)]
        self.device = device
        self.provenance = {
            "network": network,
            "backbone_sha256": short_sha256(backbone),
            "heads_sha256": short_sha256(heads),
        }

    @torch.inference_mode()
    def __call__(self, video: Tensor, reference: Tensor) -> Tensor:
        """Measure frame by frame: two (T, H_px, W_px, 3) uint8 -> (T,) float32, 0 for equal ones.

        Raises:
            ValueError: other shapes or dtypes.
        """
        check_videos(video, reference)
        smallest = _MIN_PX[self.provenance["network"]]
        if min(video.shape[1:3]) < smallest:
            size = "x".join(map(str, video.shape[1:3]))
            raise ValueError(f"LPIPS needs frames of {smallest} px or more, got {size}")
        pairs = zip(video.split(_BATCH), reference.split(_BATCH), strict=True)
        return torch.cat([self._distances(*pair) for pair in pairs]).cpu()

    def _distances(self, video: Tensor, reference: Tensor) -> Tensor:
        maps = zip(self._maps(video), self._maps(reference), self._heads, strict=True)
        parts = [((a - b).square() * head).sum(1).mean((1, 2)) for a, b, head in maps]
        return torch.stack(parts).sum(0)

    def _maps(self, frames: Tensor) -> list[Tensor]:
        """Return the unit-length feature maps (T, C, h, w) of each layer that is read."""
        x = frames.to(self.device).movedim(-1, 1).float() / 127.5 - 1
        x = (x - x.new_tensor(_SHIFT).view(3, 1, 1)) / x.new_tensor(_SCALE).view(3, 1, 1)
        maps = []
        for layer, (weight, bias) in zip(self._layers, self._kernels, strict=True):
            if layer.pool:
                x = functional.max_pool2d(x, layer.pool, stride=2)
            padding = _PADDING[layer.kernel]
            x = functional.conv2d(x, weight, bias, layer.stride, padding).relu()
            if layer.is_read:
                maps.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))
        return maps


def _read_heads(path: str | Path, layers: tuple[Convolution, ...]) -> list[Tensor]:
    """Read a weight for each channel of each layer that is compared, as (C, 1, 1)."""
    weights = read_state_dict(path)
    heads = []
    for number, layer in enumerate(layer for layer in layers if layer.is_read):
        name = f"lin{number}.model.1.weight"
        head = weights.get(name)
        given = None if head is None else tuple(head.shape)
        if head is None or given != (1, layer.channels, 1, 1):
            raise ValueError(f"{path}: {name} must be {(1, layer.channels, 1, 1)}, got {given}")
        heads.append(as_finite(head, path, name).view(-1, 1, 1))
    return heads
