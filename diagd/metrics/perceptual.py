"""LPIPS and the features of FVD, from weight files that are never unpickled unsafely."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional

from diagd.files import require_file
from diagd.metrics.frechet import Preprocessing
from diagd.weight_files import as_finite, load_torchscript, read_tensors


def short_sha256(path: str | Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


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
    """LPIPS (arXiv:1801.03924) of one pair of weight files.

    Args:
        backbone: torchvision's state dict of `alexnet` or `vgg16`.
        heads: the authors' `alex.pth` or `vgg.pth`; None uses torchmetrics' copy.
    """

    def __init__(
        self,
        backbone: str | Path,
        heads: str | Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        weights = read_tensors(backbone)
        kinds: dict[tuple[int, ...], str] = {(64, 3, 11, 11): "alex", (64, 3, 3, 3): "vgg"}
        network = kinds.get(weights.get("features.0.weight", torch.empty(0)).shape)
        if network is None:
            raise ValueError(f"{backbone} must hold features.* of torchvision's alexnet or vgg16")
        if heads is None:
            folder = Path(torchmetrics.__file__).parent / "functional" / "image" / "lpips_models"
            heads = folder / f"{network}.pth"
        self._layers, self._device = NETWORKS[network], device
        self._kernels, channels = list[tuple[Tensor, Tensor]](), 3
        for layer in self._layers:
            name, out = f"features.{layer.place}", layer.channels
            shape = out, channels, layer.kernel, layer.kernel
            weight = _tensor(weights, backbone, f"{name}.weight", shape, device)
            self._kernels.append(
                (weight, _tensor(weights, backbone, f"{name}.bias", (out,), device))
            )
            channels = out
        compared = [layer for layer in self._layers if layer.is_read]
        weights = read_tensors(heads)
        self._heads = [  # a weight for each channel
            _tensor(weights, heads, f"lin{n}.model.1.weight", (1, layer.channels, 1, 1), device)[0]
            for n, layer in enumerate(compared)
        ]
        self.provenance = {
            "network": network,
            "backbone_sha256": short_sha256(backbone),
            "heads_sha256": short_sha256(heads),
        }

    @torch.inference_mode()
    def __call__(self, video: Tensor, reference: Tensor) -> Tensor:
        """Measure frame by frame: two (T, H_px, W_px, 3) uint8 -> (T,) float32."""
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
        x = frames.to(self._device).movedim(-1, 1).float() / 127.5 - 1
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


def _tensor(
    weights: dict[str, Tensor],
    path: str | Path,
    key: str,
    shape: tuple[int, ...],
    device: torch.device | str,
) -> Tensor:
    """Return one of the weights, or raise ValueError unless it has that shape and is finite."""
    given = tuple(weights[key].shape) if key in weights else None
    if given != shape:
        raise ValueError(f"{path}: {key} must be {shape}, got {given}")
    return as_finite(weights[key], path, key, device)


INPUT_PX = 224


class VideoFeatures:
    """I3D features of clips. Loading a detector EXECUTES code in it: load what you trust."""

    def __init__(
        self,
        detector: str | Path,
        preprocessing: Preprocessing = "crop",
        device: torch.device | str = "cpu",
    ) -> None:
        self.provenance = {"resize": preprocessing, "detector_sha256": short_sha256(detector)}
        self._detector = load_torchscript(detector, device)
        self._device, self._preprocessing = device, preprocessing

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Describe a clip of MIN_FRAMES or more: (T, H_px, W_px, 3) uint8 -> (D,) float32."""
        video, rescale, resize = self.prepare(frames)
        features = self._detector(video, rescale=rescale, resize=resize, return_features=True)
        return features[0].float().cpu()

    def prepare(self, frames: Tensor) -> tuple[Tensor, bool, bool]:
        """Return the (1, 3, T, H, W) float32 input, and what is left to the detector to do."""
        pixels = frames.to(self._device).movedim(-1, 1).float()  # (T, 3, H_px, W_px)
        if self._preprocessing == "detector":
            return pixels.movedim(1, 0)[None], True, True
        if self._preprocessing == "crop":
            height, width = pixels.shape[-2:]
            scale = INPUT_PX / min(height, width)
            size = round(height * scale), round(width * scale)
        else:
            size = INPUT_PX, INPUT_PX
        pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
        top, left = (size[0] - INPUT_PX) // 2, (size[1] - INPUT_PX) // 2
        pixels = pixels[..., top : top + INPUT_PX, left : left + INPUT_PX]
        return (pixels / 127.5 - 1).movedim(1, 0)[None], False, False
