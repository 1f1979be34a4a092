"""LPIPS, ST-LPIPS and features of videos and images; weight files are read, never executed.

TorchScript is the exception: it is a program.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional

from diagd.files import require_file
from diagd.metrics.detectors import find_weights
from diagd.metrics.frechet import Preprocessing
from diagd.metrics.networks import EfficientNetLite0, I3d
from diagd.weight_files import (
    assign_weights,
    build_fitting,
    check_fit,
    load_torchscript,
    read_arrays,
    read_tensors,
    rename_by,
)


def short_sha256(path: str | Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


class Network(NamedTuple):
    """The first layers of a classifier, torchvision's `features`."""

    # (channels, kernel, stride) of a convolution and its ReLU; or kernel of a pooling of stride 2
    layers: tuple[tuple[int, int, int] | int, ...]
    compared: dict[int, int]  # indices of the ReLUs whose feature maps are compared, and channels
    min_px: int  # smaller frames leave nothing for a pooling


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
SHIFT_TOLERANT = {  # stride-1 convolutions and poolings, followed by a blur of stride 2
    "stlpips-alex": NETWORKS["alex"]._replace(
        compared={2: 64, 6: 192, 10: 384, 12: 256, 14: 256}, min_px=21
    ),
    "stlpips-vgg": NETWORKS["vgg"]._replace(
        compared={3: 64, 9: 128, 17: 256, 25: 512, 33: 512}, min_px=18
    ),
}
_SHIFT = (-0.030, -0.088, -0.188)  # from pixels in [-1, 1] to the input of ImageNet classifiers
_SCALE = (0.458, 0.448, 0.450)
_BATCH = 16  # frames at once; limits memory


class Lpips:
    """LPIPS (arXiv:1801.03924) of one pair of weight files.

    Args:
        backbone: torchvision's state dict of `alexnet` or `vgg16`.
        heads: the authors' `alex.pth` or `vgg.pth`; None uses torchmetrics' copy.
    """

    title = "LPIPS"

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
            weighting = _heads_of(self._network)
        for module, tensors, path in (
            (nn.ModuleDict({"features": self._features}), used, backbone),
            (weighting, lins, heads),
        ):
            check_fit(module, tensors, path, f"LPIPS of {network}")
            assign_weights(module, tensors, path, device)
        self._heads = [weights[0] for weights in weighting.values()]  # (C, 1, 1) each
        both = (torch.tensor(values, device=device) for values in (_SHIFT, _SCALE))
        self._shift, self._scale = (values.view(3, 1, 1) for values in both)
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
            raise ValueError(f"{self.title} needs frames of {smallest} px or more, got {size}")
        distances = []
        for ours, theirs in zip(video.split(_BATCH), reference.split(_BATCH), strict=True):
            maps = zip(self._maps(ours), self._maps(theirs), self._heads, strict=True)
            parts = [((a - b).square() * head).sum(1).mean((1, 2)) for a, b, head in maps]
            distances.append(torch.stack(parts).sum(0))
        return torch.cat(distances).cpu()

    def _maps(self, frames: Tensor) -> list[Tensor]:
        x = frames.to(self._device).movedim(-1, 1).float() / 127.5 - 1
        x = (x - self._shift) / self._scale
        maps = []
        for place, layer in enumerate(self._features):
            x = layer(x)
            if place in self._network.compared:
                maps.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))  # (T, C, h, w)
        return maps


def features_of(network: Network, shift_tolerant: bool = False) -> nn.Sequential:
    modules, channels = list[nn.Module](), 3
    for layer in network.layers:
        if isinstance(layer, int):
            pooling = nn.MaxPool2d(layer, stride=1 if shift_tolerant else 2)
            modules += [pooling, _Blur(channels)] if shift_tolerant else [pooling]
            continue
        out, kernel, stride = layer
        blurs = shift_tolerant and stride > 1
        convolution = nn.Conv2d(channels, out, kernel, 1 if blurs else stride, min(kernel // 2, 2))
        modules += [convolution, _Blur(out), nn.ReLU()] if blurs else [convolution, nn.ReLU()]
        channels = out
    return nn.Sequential(*modules)


def _heads_of(network: Network) -> nn.ParameterDict:
    sizes = enumerate(network.compared.values())
    return nn.ParameterDict({f"lin{n}": torch.empty(1, c, 1, 1) for n, c in sizes})


class _Blur(nn.Module):
    """A depthwise 3x3 px filter of stride 2, mirrored at the borders."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filt = nn.Parameter(torch.empty(channels, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (2, 2, 2, 2), mode="reflect")
        return functional.conv2d(padded, self.filt, stride=2, groups=len(self.filt))


class StLpips(Lpips):
    """Shift-tolerant LPIPS (arXiv:2207.13686); one file holds backbone and heads.

    Its values are not comparable with LPIPS: the networks were retrained with other layers.

    Args:
        detector: `stlpips-alex` or `stlpips-vgg`, from the installed package, or with `=FILE`.
    """

    title = "ST-LPIPS"

    def __init__(self, detector: str, device: torch.device | str = "cpu") -> None:
        name, path = find_weights(detector)
        self._network, self._device = SHIFT_TOLERANT[str(name)], device
        patterns = (r"^net\.slice\d\.", "features."), (r"^(lin\d)\.model\.1\.weight$", r"heads.\1")
        weights = rename_by(patterns, read_tensors(path))

        def make() -> nn.ModuleDict:
            scaling = {part: torch.empty(1, 3, 1, 1) for part in ("shift", "scale")}
            return nn.ModuleDict(
                {
                    "features": features_of(self._network, shift_tolerant=True),
                    "scaling_layer": nn.ParameterDict(scaling),
                    "heads": _heads_of(self._network),
                }
            )

        whole = build_fitting(make, weights, path, str(name)).to(device)
        self._features, scaling = whole["features"], whole["scaling_layer"]
        self._shift, self._scale = scaling["shift"], scaling["scale"]
        self._heads = [head[0] for head in whole["heads"].values()]
        self.provenance = {"network": str(name), "weights_sha256": short_sha256(path)}


class ImageFeatures:
    """Inception features of pictures. Loading a detector EXECUTES code in it, as for FVD."""

    def __init__(self, detector: str | Path, device: torch.device | str = "cpu") -> None:
        self.provenance = {"detector_sha256": short_sha256(detector)}
        self._detector, self._device = load_torchscript(detector, device), device

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Compute features: (N, H_px, W_px, 3) uint8 -> (N, D) float32."""
        pixels = frames.to(self._device).movedim(-1, 1)  # the detector scales them
        return self._detector(pixels, return_features=True).float().cpu()


INPUT_PX = 224


class EfficientNetFeatures:
    """EfficientNet-Lite0 features of pictures; their Frechet distance (EFD) is not the FID.

    Args:
        detector: `efficientnet-lite0`, from the installed package, or with `=FILE`.
    """

    def __init__(self, detector: str, device: torch.device | str = "cpu") -> None:
        name, path = find_weights(detector)
        named = rename_by([(r"(^|\.)_", r"\1")], read_tensors(path))
        weights = {n: w for n, w in named.items() if not n.endswith("num_batches_tracked")}
        self._network = build_fitting(EfficientNetLite0, weights, path, str(name)).to(device)
        self._device = device
        self.provenance = {"network": str(name), "weights_sha256": short_sha256(path)}

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Compute features, stretched to 224 x 224 px: (N, H_px, W_px, 3) uint8 -> (N, 1280)."""
        pixels = frames.to(self._device).movedim(-1, 1).float()
        size = INPUT_PX, INPUT_PX
        pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
        return self._network((pixels - 127) / 128).cpu()


# flax's names: params/Mixed_3b/Branch_0/Conv3d_0a_1x1/Conv_0/kernel
_I3D_NAMES = (r"^(params|batch_stats)/", ""), (r"/(Conv|BatchNorm)_0/", "/"), ("/", ".")


def _of_scaled(network: I3d, video: Tensor, *, rescale: bool, resize: bool) -> Tensor:
    assert (rescale, resize) == (False, False)
    return network(video)


class VideoFeatures:
    """I3D features of clips.

    Args:
        detector: `i3d`, from the installed package or with `=FILE`: 400 logits, as in the FVD
            paper. Otherwise a TorchScript file. Loading it EXECUTES code in it: only load what
            you trust.
    """

    def __init__(
        self,
        detector: str | Path,
        preprocessing: Preprocessing = "crop",
        device: torch.device | str = "cpu",
    ) -> None:
        name, path = find_weights(detector)
        self.provenance = {"resize": preprocessing, "detector_sha256": short_sha256(path)}
        if name is None:
            self._detector = partial(load_torchscript(path, device), return_features=True)
        else:
            self.provenance |= {"detector": name}
            network = build_fitting(I3d, rename_by(_I3D_NAMES, read_arrays(path)), path, name)
            self._detector = partial(_of_scaled, network.to(device))
        self._device, self._preprocessing = device, preprocessing

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Compute features of MIN_FRAMES or more: (T, H_px, W_px, 3) uint8 -> (D,) float32."""
        video, rescale, resize = self.prepare(frames)
        features = self._detector(video, rescale=rescale, resize=resize)
        return features[0].float().cpu()

    def prepare(self, frames: Tensor) -> tuple[Tensor, bool, bool]:
        """Return the (1, 3, T, H, W) float32 input, and the steps left to the detector."""
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
