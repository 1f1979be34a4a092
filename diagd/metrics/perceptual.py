"""LPIPS and the features of FVD, from weight files that are never unpickled unsafely."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional

from diagd.files import require_file
from diagd.metrics.frechet import Preprocessing
from diagd.weight_files import assign_weights, check_fit, load_torchscript, read_tensors


def short_sha256(path: str | Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


class Network(NamedTuple):
    """The first layers of a classifier, torchvision's `features`."""

    # (channels, kernel, stride) of a convolution and its ReLU; or kernel of a pooling of stride 2
    layers: tuple[tuple[int, int, int] | int, ...]
    compared: dict[int, int]  # places of the ReLUs whose feature maps are compared, and channels
    min_px: int  # below, a pooling has nothing left


NETWORKS = {
    "alex": Network(
        ((64, 11, 4), 3, (192, 5, 1), 3, (384, 3, 1), (256, 3, 1), (256, 3, 1)),
        compared={1: 64, 4: 192, 7: 384, 9: 256, 11: 256},
        min_px=31,
    ),
    "vgg": Network(
        (
            *((64, 3, 1), (64, 3, 1), 2, (128, 3, 1), (128, 3, 1), 2),
            *((256, 3, 1), (256, 3, 1), (256, 3, 1), 2, (512, 3, 1), (512, 3, 1), (512, 3, 1), 2),
            *((512, 3, 1), (512, 3, 1), (512, 3, 1)),
        ),
        compared={3: 64, 8: 128, 15: 256, 22: 512, 29: 512},
        min_px=16,
    ),
}
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
        self._network, self._device = NETWORKS[network], device
        used = {name: w for name, w in weights.items() if name.startswith("features.")}
        lins = {n.removesuffix(".model.1.weight"): w for n, w in read_tensors(heads).items()}
        with torch.device("meta"):
            self._features = features_of(self._network)
            sizes = enumerate(self._network.compared.values())
            weighting = nn.ParameterDict({f"lin{n}": torch.empty(1, c, 1, 1) for n, c in sizes})
        for module, tensors, path in (
            (nn.ModuleDict({"features": self._features}), used, backbone),
            (weighting, lins, heads),
        ):
            check_fit(module, tensors, path, f"LPIPS of {network}")
            assign_weights(module, tensors, path, device)
        self._heads = [weights[0] for weights in weighting.values()]  # (C, 1, 1) each
        self.provenance = {
            "network": network,
            "backbone_sha256": short_sha256(backbone),
            "heads_sha256": short_sha256(heads),
        }

    @torch.inference_mode()
    def __call__(self, video: Tensor, reference: Tensor) -> Tensor:
        """Measure frame by frame: two (T, H_px, W_px, 3) uint8 -> (T,) float32."""
        if min(video.shape[1:3]) < (smallest := self._network.min_px):
            size = "x".join(map(str, video.shape[1:3]))
            raise ValueError(f"LPIPS needs frames of {smallest} px or more, got {size}")
        distances = []
        for ours, theirs in zip(video.split(_BATCH), reference.split(_BATCH), strict=True):
            maps = zip(self._maps(ours), self._maps(theirs), self._heads, strict=True)
            parts = [((a - b).square() * head).sum(1).mean((1, 2)) for a, b, head in maps]
            distances.append(torch.stack(parts).sum(0))
        return torch.cat(distances).cpu()

    def _maps(self, frames: Tensor) -> list[Tensor]:
        x = frames.to(self._device).movedim(-1, 1).float() / 127.5 - 1
        x = (x - x.new_tensor(_SHIFT).view(3, 1, 1)) / x.new_tensor(_SCALE).view(3, 1, 1)
        maps = []
        for place, layer in enumerate(self._features):
            x = layer(x)
            if place in self._network.compared:
                maps.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))  # (T, C, h, w)
        return maps


def features_of(network: Network) -> nn.Sequential:
    modules, channels = list[nn.Module](), 3
    for layer in network.layers:
        if isinstance(layer, int):
            modules.append(nn.MaxPool2d(layer, stride=2))
        else:
            out, kernel, stride = layer
            modules += [nn.Conv2d(channels, out, kernel, stride, min(kernel // 2, 2)), nn.ReLU()]
            channels = out
    return nn.Sequential(*modules)


class ImageFeatures:
    """Inception features of pictures. Loading a detector EXECUTES code in it, as of FVD's."""

    def __init__(self, detector: str | Path, device: torch.device | str = "cpu") -> None:
        self.provenance = {"detector_sha256": short_sha256(detector)}
        self._detector, self._device = load_torchscript(detector, device), device

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Describe pictures: (N, H_px, W_px, 3) uint8 -> (N, D) float32."""
        pixels = frames.to(self._device).movedim(-1, 1)  # it scales them itself
        return self._detector(pixels, return_features=True).float().cpu()


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
        size = INPUT_PX, INPUT_PX
        if self._preprocessing == "crop":
            scale = INPUT_PX / min(pixels.shape[-2:])
            size = round(pixels.shape[-2] * scale), round(pixels.shape[-1] * scale)
        pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
        top, left = (size[0] - INPUT_PX) // 2, (size[1] - INPUT_PX) // 2
        pixels = pixels[..., top : top + INPUT_PX, left : left + INPUT_PX]
        return (pixels / 127.5 - 1).movedim(1, 0)[None], False, False
