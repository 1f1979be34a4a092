"""Read and write videos as uint8 tensors (T, H_px, W_px, 3), through PyAV."""

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.error import FFmpegError
from torch import Tensor
from torch.nn import functional

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class Video:
    """A decoded clip.

    Attributes:
        frames: (T, H_px, W_px, 3) uint8 RGB.
        fps: frames per second; 1 for a still image.
    """

    frames: Tensor
    fps: Fraction


def read_video(path: str | Path, max_frames: int | None = None) -> Video:
    """Decode the first `max_frames` frames of a video, or the one frame of an image.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no video, is damaged, is truncated or holds no frame.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"video not found: {path}")
    frames = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path} holds no video stream (corrupt or truncated?)")
            stream = container.streams.video[0]
            expected = stream.frames  # 0 when the container does not say
            fps = Fraction(stream.average_rate or 1)
            if stream.codec_context is None:
                raise ValueError(f"{path} cannot be decoded (corrupt or truncated): no codec")
            stream.codec_context.options = {"err_detect": "explode"}  # else damage is painted over
            for frame in container.decode(stream):
                frames.append(frame.to_ndarray(format="rgb24"))
                if max_frames is not None and len(frames) == max_frames:
                    break
    except (FFmpegError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be decoded (corrupt or truncated): {reason}") from None
    if not frames:
        raise ValueError(f"{path} holds no frames (corrupt or truncated)")
    wanted = expected if max_frames is None else min(expected, max_frames)
    if len(frames) < wanted:
        raise ValueError(f"{path} is truncated: expected {wanted} frames, decoded {len(frames)}")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        frames, fps = frames[:1], Fraction(1)
    return Video(torch.from_numpy(np.stack(frames)), fps)


def write_video(
    path: str | Path, frames: Tensor, fps: Fraction | float = 10, crf: int = 14
) -> None:
    """Write frames as H.264 mp4; the file appears under its name only when it is whole.

    Args:
        frames: (T, H_px, W_px, 3) uint8 RGB; both sizes even.
        crf: quality, 0 (lossless) to 51 (worst).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with av.open(str(temporary), "w", format="mp4") as container:
            stream = container.add_stream(
                "libx264",
                rate=Fraction(fps).limit_denominator(1001),
                options={
                    "crf": str(crf),
                    "preset": "medium",
                    # else the bytes depend on the number of cores, and mbtree reads stray memory
                    "x264-params": "threads=1:mbtree=0",
                },
            )
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            for frame in frames.numpy():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_image(path: str | Path, image: Tensor) -> None:
    """Write one (H_px, W_px, 3) uint8 RGB picture as PNG."""
    path = Path(path)
    encoder = av.CodecContext.create("png", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width = image.shape[:2]
    encoder.pix_fmt = "rgb24"
    encoder.time_base = Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image.numpy()), format="rgb24")
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(b"".join(bytes(p) for p in [*encoder.encode(frame), *encoder.encode()]))
    os.replace(temporary, path)


def contact_sheet(frames: Tensor, columns: int = 4, gap_px: int = 4) -> Tensor:
    """Lay frames out in rows: (T, H_px, W_px, 3) uint8 -> one (H, W, 3) uint8 picture."""
    rows = -(-frames.shape[0] // columns)
    height_px, width_px = frames.shape[1] + gap_px, frames.shape[2] + gap_px
    sheet = frames.new_full((rows * height_px + gap_px, columns * width_px + gap_px, 3), 255)
    for index, frame in enumerate(frames):
        top = gap_px + index // columns * height_px
        left = gap_px + index % columns * width_px
        sheet[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return sheet


def resize(frames: Tensor, height_px: int, width_px: int) -> Tensor:
    """Fit frames to a size: crop the centre to its aspect ratio, then scale (antialiased).

    Args:
        frames: (T, H_px, W_px, 3) uint8.

    Returns:
        (T, height_px, width_px, 3) uint8.
    """
    full_height, full_width = frames.shape[1:3]
    scale = min(full_height / height_px, full_width / width_px)
    crop_height, crop_width = round(height_px * scale), round(width_px * scale)
    top, left = (full_height - crop_height) // 2, (full_width - crop_width) // 2
    frames = frames[:, top : top + crop_height, left : left + crop_width]
    if frames.shape[1:3] == (height_px, width_px):
        return frames
    pixels = functional.interpolate(
        frames.movedim(-1, 1).float(), (height_px, width_px), mode="bilinear", antialias=True
    )
    return pixels.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).contiguous()
