"""Videos in any container and codec, for what reads videos."""

from fractions import Fraction
from pathlib import Path

import av
from torch import Tensor


def encode_video(
    path: Path,
    frames: Tensor,
    rate: Fraction | int = 10,
    codec: str = "mpeg4",
    pixels: str = "yuv420p",
    **options: str,
) -> None:
    """Write (T, H_px, W_px, 3) uint8 in the container of the path's suffix, with any codec."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
