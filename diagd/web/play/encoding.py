"""Frames as JPEG for the page, and a recording of them as mp4."""

import io
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diagd.data.video import encode_video

QUALITY = 92


def to_jpeg(frame: Tensor) -> bytes:
    """Compress one (H_px, W_px, 3) uint8 RGB frame, its colours at full resolution."""
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def from_jpeg(picture: bytes) -> Tensor:
    """Undo `to_jpeg`, at JPEG's loss. Only for pictures that we made."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture))))


def to_mp4(pictures: Sequence[bytes], fps: Fraction | float) -> bytes:
    """Turn the JPEGs of a recording into an mp4."""
    return encode_video(torch.stack([from_jpeg(picture) for picture in pictures]), fps)
