"""Weight files of metrics: told apart by a short hash, and never unpickled unsafely."""

import hashlib
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional

from diagd.metrics.frechet import MIN_FRAMES, Preprocessing
from diagd.metrics.quality import check_videos
from diagd.weight_files import UNPICKLING_ERRORS, as_finite, load_torchscript


def short_sha256(path: str | Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256, as printed beside numbers it made."""
    with _existing(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Load a .pth state dict on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no state dict, or one that only code execution could load.
    """
    path = _existing(path)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except UNPICKLING_ERRORS:  # whose texts advise to execute the file
        raise ValueError(
            f"{path} is no state dict: damaged, or more than tensors in it: not loaded"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise ValueError(f"{path} is no state dict: expected names and tensors")
    return weights


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"weights not found: {path}")
    return path


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


INPUT_PX = 224


class VideoFeatures:
    """I3D features of clips.

    Attributes:
        provenance: the preprocessing and the short hash of the detector.
    """

    def __init__(
        self,
        detector: str | Path,
        preprocessing: Preprocessing = "crop",
        device: torch.device | str = "cpu",
    ) -> None:
        """Load a detector. This EXECUTES code that the file contains: load what you trust.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no TorchScript, or an unknown preprocessing.
        """
        if preprocessing not in get_args(Preprocessing):
            raise ValueError(
                f"preprocessing must be one of {', '.join(get_args(Preprocessing))}, "
                f"got {preprocessing!r}"
            )
        sha256 = short_sha256(detector)
        self._detector = load_torchscript(detector, device)
        self.device, self.preprocessing = device, preprocessing
        self.provenance = {"resize": preprocessing, "detector_sha256": sha256}

    @torch.inference_mode()
    def __call__(self, frames: Tensor) -> Tensor:
        """Describe a clip: (T, H_px, W_px, 3) uint8 -> (D,) float32.

        Raises:
            ValueError: fewer than 10 frames.
        """
        if len(frames) < MIN_FRAMES:
            raise ValueError(f"FVD needs clips of at least {MIN_FRAMES} frames, got {len(frames)}")
        video, rescale, resize = self.prepare(frames)
        features = self._detector(video, rescale=rescale, resize=resize, return_features=True)
        return features[0].float().cpu()

    def prepare(self, frames: Tensor) -> tuple[Tensor, bool, bool]:
        """Return the (1, 3, T, H, W) float32 input, and what is left to the detector to do."""
        pixels = frames.to(self.device).movedim(-1, 1).float()  # (T, 3, H_px, W_px)
        if self.preprocessing == "detector":
            return pixels.movedim(1, 0)[None], True, True
        if self.preprocessing == "crop":
            height, width = pixels.shape[-2:]
            scale = INPUT_PX / min(height, width)
            size = round(height * scale), round(width * scale)
        else:
            size = INPUT_PX, INPUT_PX
        pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
        top, left = (size[0] - INPUT_PX) // 2, (size[1] - INPUT_PX) // 2
        pixels = pixels[..., top : top + INPUT_PX, left : left + INPUT_PX]
        return (pixels / 127.5 - 1).movedim(1, 0)[None], False, False
