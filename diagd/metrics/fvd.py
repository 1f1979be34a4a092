"""FVD: Frechet distance between features of whole clips (arXiv:1812.01717), detector from a file.

The detector is the I3D TorchScript that StyleGAN-V made common (`i3d_torchscript.pt`), called as
`detector(video, rescale=..., resize=..., return_features=True)` with videos (N, 3, T, H, W), which
returns (N, 400). TorchScript runs code: a detector executes what is in its file, so load one only
from whom you trust. FVD depends on the preprocessing by several percent, so it has a name here that
belongs beside every number, as do the hash of the detector, the number of clips and of frames.
"""

from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from diagd.metrics.preprocessing import MIN_FRAMES, Preprocessing
from diagd.metrics.weights import short_sha256
from diagd.torchscript import load_torchscript

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
