"""Read and write videos and pictures as uint8 RGB tensors (T, H_px, W_px, 3)."""

import collections
import contextlib
import io
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.filter import Graph
from av.video.stream import VideoStream
from torch import Tensor
from torch.nn import functional

from diagd.data.frames import Rate, Shown, opened
from diagd.files import check_suffix, naming, require_file, write_bytes


@dataclass(frozen=True)
class Video:
    frames: Tensor  # (T, H_px, W_px, 3) uint8 RGB
    fps: Fraction  # average; 1 for a still image


def read_video(
    path: str | Path,
    max_frames: int | None = None,
    *,
    start: int = 0,
    last: int | None = None,
    fps: Rate | None = None,
    size_px: tuple[int, int] | None = None,
) -> Video:
    """Read up to `max_frames` frames of a film or an animation, or the one frame of an image.

    Frames are as a player or a browser shows them (see `frames`). Only these are kept in memory, at
    their final size.

    Args:
        start: frames to skip, counted at the rate of `fps`.
        last: keep only this many frames, from the end.
        fps: lower frame rate to resample to (see `Times.numbers`); default: every frame.
        size_px: (height_px, width_px) to fit frames to (see `resize`); default: as shown.
    """
    with open_video(path) as shown:
        numbers = itertools.count(start)
        if fps is not None or last is not None:
            with naming(path):
                numbers = shown.times.numbers(fps, start)
        numbers = itertools.islice(numbers, max_frames)
        if last is not None:
            numbers = collections.deque(numbers, maxlen=last)
        frames = [fit(torch.from_numpy(frame), size_px) for frame in shown.frames(numbers)]
        if not frames:
            ends = f"got {len(shown.times.starts)}"
            raise ValueError(f"{path}: expected more than {start} frames, {ends}")
        return Video(torch.stack(frames), shown.times.rate if fps is None else Fraction(fps))


@contextlib.contextmanager
def open_video(path: str | Path) -> Iterator[Shown]:
    """Open a film, an animation or an image by its path, or raise ValueError."""
    with require_file(path, "video").open("rb") as file, opened(file, str(path)) as shown:
        yield shown


def video_length(path: str | Path) -> tuple[int, Fraction]:
    """Return the number of frames and the average rate; films are not decoded."""
    with open_video(path) as shown:
        return len(shown.times.starts), shown.times.rate


@contextlib.contextmanager
def one_thread_workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool whose threads run each torch operation on one core, for sharing cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # the workers also changed the default of later threads


def resize(frames: Tensor, height_px: int, width_px: int) -> Tensor:
    """Crop the centre of uint8 frames (T, H_px, W_px, 3) to an aspect ratio, then scale it."""
    full_height, full_width = frames.shape[1:3]
    scale = min(full_height / height_px, full_width / width_px)
    crop_height = max(round(height_px * scale), 1)  # not 0 for a picture one pixel wide
    crop_width = max(round(width_px * scale), 1)
    top, left = (full_height - crop_height) // 2, (full_width - crop_width) // 2
    frames = frames[:, top : top + crop_height, left : left + crop_width]
    return stretch(frames, height_px, width_px)


def stretch(frames: Tensor, height_px: int, width_px: int) -> Tensor:
    """Scale uint8 frames (T, H_px, W_px, 3) as a whole, whatever their aspect ratio."""
    if frames.shape[1:3] == (height_px, width_px):
        return frames
    pixels = functional.interpolate(
        frames.movedim(-1, 1).float(), (height_px, width_px), mode="bilinear", antialias=True
    )
    return pixels.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).contiguous()


def fit(frame: Tensor, size_px: tuple[int, int] | None) -> Tensor:
    """Resize one (H_px, W_px, 3) uint8 frame to (height_px, width_px), or leave it as it is."""
    return frame if size_px is None else resize(frame[None], *size_px)[0]


def contact_sheet(frames: Tensor, columns: int = 5, gap_px: int = 4) -> Tensor:
    """Arrange frames in rows: (T, H_px, W_px, 3) uint8 -> one (H, W, 3) uint8 picture."""
    before = 0, 0, gap_px, 0, gap_px, 0, 0, -len(frames) % columns  # pad the last row
    cells = functional.pad(frames, before, value=255).unflatten(0, (-1, columns))
    sheet = cells.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return functional.pad(sheet, (0, 0, 0, gap_px, 0, gap_px), value=255)


def save_frames(path: str | Path, frames: Tensor, fps: Rate) -> None:
    """Write .mp4 (H.264), .gif or .webp (both loop), or .png: one frame, or five side by side."""
    check_suffix(path)
    suffix, frames = Path(path).suffix.lower(), frames.cpu()
    is_sheet = suffix == ".png" and len(frames) > 1
    pictures = contact_sheet(frames)[None] if is_sheet else frames
    write_bytes(path, encode_video(pictures, fps, suffix[1:]))


def write_image(path: str | Path, image: Tensor) -> None:
    """Write one (H_px, W_px, 3) uint8 RGB picture as PNG."""
    write_bytes(path, encode_video(image[None], suffix="png"))


def write_video(path: str | Path, frames: Tensor, fps: Rate = 10, crf: int = 14) -> None:
    """Write frames of even sizes as H.264; `crf` is 0 (lossless) to 51 (worst)."""
    write_bytes(path, encode_video(frames, fps, crf=str(crf)))


# container, codec, pixel format and options by suffix
_FORMATS = {
    # with more threads the bytes depend on the number of cores, and mbtree reads stray memory
    "mp4": ("mp4", "libx264", "yuv420p", {"crf": "14", "x264-params": "threads=1:mbtree=0"}),
    "gif": ("gif", "gif", "pal8", {}),
    "webp": ("webp", "libwebp_anim", "yuv420p", {"quality": "85"}),
    "png": ("image2pipe", "png", "rgb24", {}),
}


def encode_video(frames: Tensor, fps: Rate = 10, suffix: str = "mp4", **options: str) -> bytes:
    """Encode frames in one of `_FORMATS`, with options of its codec."""
    container, codec, pixel_format, defaults = _FORMATS[suffix]
    rate = Fraction(fps).limit_denominator(1001)
    pictures = _with_palette(frames, fps) if suffix == "gif" else map(_picture, frames)
    whole = io.BytesIO()
    with av.open(whole, "w", format=container) as file:
        if suffix == "webp":
            file.options["loop"] = "0"  # forever, like a GIF
        stream = file.add_stream(codec, rate=rate, options=defaults | options)
        assert isinstance(stream, VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixel_format
        for picture in pictures:
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    return whole.getvalue()


def _picture(frame: Tensor) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(frame.numpy()), format="rgb24")


def _with_palette(frames: Tensor, fps: Rate) -> Iterator[av.VideoFrame]:
    """Yield the pictures in the best 256 colours for the whole clip."""
    graph, tick = Graph(), Fraction(1, 100)
    height_px, width_px = frames.shape[1:3]
    source = graph.add_buffer(
        width=width_px, height=height_px, format=av.VideoFormat("rgb24"), time_base=tick
    )
    split, palette, use, sink = map(graph.add, ("split", "palettegen", "paletteuse", "buffersink"))
    graph.link_nodes(source, split, palette)
    split.link_to(use, 1)
    palette.link_to(use, 0, 1)
    graph.link_nodes(use, sink).configure()
    for number, frame in enumerate(frames):
        picture = _picture(frame)
        picture.pts, picture.time_base = round(number / (Fraction(fps) * tick)), tick
        source.push(picture)
    source.push(None)  # the palette needs all frames
    for _ in frames:
        picture = sink.pull()
        assert isinstance(picture, av.VideoFrame)
        yield picture
