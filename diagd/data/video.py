"""Read and write videos as uint8 tensors (T, H_px, W_px, 3), through PyAV."""

import collections
import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer
from av.error import FFmpegError
from av.filter import Graph
from av.video.stream import VideoStream
from torch import Tensor
from torch.nn import functional

from diagd.files import FRAME_SUFFIXES, check_suffix, replacing, write_bytes

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


def read_video(
    path: str | Path,
    max_frames: int | None = None,
    *,
    start: int = 0,
    last: int | None = None,
    fps: Fraction | float | None = None,
    size_px: tuple[int, int] | None = None,
) -> Video:
    """Decode up to `max_frames` frames of a video, or the one frame of an image.

    Only these are kept in memory, each at its final size; the file is read no further.

    Args:
        start: frames left out at the head, counted at the rate of `fps`.
        last: keep only so many, those at the end.
        fps: read at a lower frame rate (see `frame_numbers`); default: every frame.
        size_px: (height_px, width_px) that frames are fitted to (see `resize`); default: as stored.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no video, is damaged, is truncated or holds no such frame.
    """
    frames, decoded = collections.deque[Tensor](maxlen=last), 0
    with _opened(path) as (container, stream):
        expected = stream.frames  # 0 when the container does not say
        rate = Fraction(stream.average_rate or stream.guessed_rate or 1)
        if stream.codec_context is None:
            raise ValueError(f"{path} cannot be decoded (corrupt or truncated): no codec")
        stream.codec_context.options = {"err_detect": "explode"}  # else damage is painted over
        numbers = frame_numbers(rate, fps, start)
        wanted = next(numbers)
        for number, frame in enumerate(container.decode(stream)):
            decoded += 1
            if number < wanted:
                continue
            frames.append(fit(_upright(frame), size_px))
            if len(frames) == max_frames:
                break
            wanted = next(numbers)
    if not decoded:
        raise ValueError(f"{path} holds no frames (corrupt or truncated)")
    if decoded < expected and len(frames) != max_frames:
        raise ValueError(f"{path} is truncated: expected {expected} frames, decoded {decoded}")
    if not frames:
        raise ValueError(f"{path} has no frame behind the first {start}, it ends after {decoded}")
    if Path(path).suffix.lower() in IMAGE_SUFFIXES:
        return Video(frames[0][None], Fraction(1))
    return Video(torch.stack(list(frames)), rate if fps is None else Fraction(fps))


def _upright(frame: av.VideoFrame) -> Tensor:
    """Return (H_px, W_px, 3) uint8 RGB, turned as the file says (telephones film on their side)."""
    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24"))
    return torch.rot90(pixels, round(frame.rotation / 90)).contiguous()


def video_length(path: str | Path) -> tuple[int, Fraction]:
    """Return the number of frames of a video and its frame rate; decodes nothing.

    The number is what the file says, or else how many packets it has.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no video.
    """
    with _opened(path) as (container, stream):
        rate = Fraction(stream.average_rate or stream.guessed_rate or 1)
        return stream.frames or sum(packet.size > 0 for packet in container.demux(stream)), rate


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video for reading, and tell in one line what is wrong with it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"video not found: {path}")
    try:
        # as a stream of bytes: ffmpeg takes `a:b.mp4` for an address and `50%d.png` for a pattern
        with Path(path).open("rb") as file, av.open(file, "r") as container:
            if not container.streams.video:
                raise ValueError(f"{path} holds no video stream (corrupt or truncated?)")
            yield container, container.streams.video[0]
    except (FFmpegError, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be decoded (corrupt or truncated): {reason}") from None


def frame_numbers(rate: Fraction, fps: Fraction | float | None, start: int = 0) -> Iterator[int]:
    """Count the frames of a video, from 0, that show it at another frame rate, without an end.

    Frame n of the slower video is the nearest one in time, n * rate / fps, halves up; frames are
    taken to be evenly spaced. None is ever shown twice.

    Args:
        rate: frames per second of the video.
        fps: those wanted; None, or up to 1% more than there are (30 for 29.97), for all frames.
        start: the first n.

    Raises:
        ValueError: `fps` or `start` out of range.
    """
    if start < 0:
        raise ValueError(f"start must be 0 or more, got {start}")
    if fps is not None and not 0 < fps <= rate * Fraction(101, 100):
        raise ValueError(f"fps must be above 0 and at most the video's {float(rate):g}, got {fps}")
    ratio = Fraction(1) if fps is None else max(rate / Fraction(fps), Fraction(1))
    return (int(n * ratio + Fraction(1, 2)) for n in itertools.count(start))


def write_video(
    path: str | Path, frames: Tensor, fps: Fraction | float = 10, crf: int = 14
) -> None:
    """Write frames as H.264 mp4; the file appears under its name only when it is whole.

    Args:
        frames: (T, H_px, W_px, 3) uint8 RGB; both sizes even.
        crf: quality, 0 (lossless) to 51 (worst).
    """
    write_bytes(path, encode_video(frames, fps, crf))


def encode_video(frames: Tensor, fps: Fraction | float = 10, crf: int = 14) -> bytes:
    """Return what `write_video` writes."""
    whole = io.BytesIO()
    with av.open(whole, "w", format="mp4") as container:
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
    return whole.getvalue()


def write_image(path: str | Path, image: Tensor) -> None:
    """Write one (H_px, W_px, 3) uint8 RGB picture as PNG."""
    encoder = av.CodecContext.create("png", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width = image.shape[:2]
    encoder.pix_fmt = "rgb24"
    encoder.time_base = Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image.numpy()), format="rgb24")
    packets = [*encoder.encode(frame), *encoder.encode()]
    write_bytes(path, b"".join(bytes(packet) for packet in packets))


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


def fit(frame: Tensor, size_px: tuple[int, int] | None) -> Tensor:
    """Fit one (H_px, W_px, 3) uint8 frame to (height_px, width_px), or leave it as it is."""
    return frame if size_px is None else resize(frame[None], *size_px)[0]


def resize(frames: Tensor, height_px: int, width_px: int) -> Tensor:
    """Fit frames to a size: crop the centre to its aspect ratio, then scale (antialiased).

    Args:
        frames: (T, H_px, W_px, 3) uint8.

    Returns:
        (T, height_px, width_px, 3) uint8.
    """
    full_height, full_width = frames.shape[1:3]
    scale = min(full_height / height_px, full_width / width_px)
    crop_height = max(round(height_px * scale), 1)  # 0 for a picture one pixel wide
    crop_width = max(round(width_px * scale), 1)
    top, left = (full_height - crop_height) // 2, (full_width - crop_width) // 2
    frames = frames[:, top : top + crop_height, left : left + crop_width]
    if frames.shape[1:3] == (height_px, width_px):
        return frames
    pixels = functional.interpolate(
        frames.movedim(-1, 1).float(), (height_px, width_px), mode="bilinear", antialias=True
    )
    return pixels.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).contiguous()


SHEET_COLUMNS = 5


def save_frames(path: str | Path, frames: Tensor, fps: Fraction | float) -> None:
    """Write frames as .mp4 (H.264), .gif or .webp (both play without end), or .png: side by side.

    Args:
        path: its suffix says what is written; the file is whole or not there.
        frames: (T, H_px, W_px, 3) uint8 RGB; for .mp4 both sizes are even.
        fps: frames per second; a .png shows all of them at once, five in a row.

    Raises:
        ValueError: another suffix.
    """
    check_suffix(path)
    WRITERS[Path(path).suffix.lower()](Path(path), frames.cpu(), Fraction(fps))


def _write_gif(path: Path, frames: Tensor, fps: Fraction) -> None:
    """Write with a palette of the 256 colours that the whole clip needs most."""
    graph, rate = Graph(), fps.limit_denominator(1001)
    height_px, width_px = frames.shape[1:3]
    source = graph.add_buffer(
        width=width_px, height=height_px, format=av.VideoFormat("rgb24"), time_base=Fraction(1, 100)
    )
    split, palette, use, sink = (
        graph.add(name) for name in ("split", "palettegen", "paletteuse", "buffersink")
    )
    source.link_to(split)
    split.link_to(palette, 0)
    split.link_to(use, 1)
    palette.link_to(use, 0, 1)
    use.link_to(sink)
    graph.configure()
    with replacing(path) as temporary, av.open(str(temporary), "w", format="gif") as container:
        stream = container.add_stream("gif", rate=rate)
        stream.height, stream.width = height_px, width_px
        stream.pix_fmt = "pal8"
        for number, frame in enumerate(frames.numpy()):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = round(100 * number / fps), Fraction(1, 100)
            source.push(picture)
        source.push(None)  # the palette is chosen when all frames are known
        for _ in frames:
            picture = sink.pull()
            assert isinstance(picture, av.VideoFrame)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _write_webp(path: Path, frames: Tensor, fps: Fraction) -> None:
    with replacing(path) as temporary, av.open(str(temporary), "w", format="webp") as container:
        container.options["loop"] = "0"
        stream = container.add_stream(
            "libwebp_anim", rate=fps.limit_denominator(1001), options={"quality": "85"}
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def _write_sheet(path: Path, frames: Tensor, fps: Fraction) -> None:
    write_image(path, contact_sheet(frames, SHEET_COLUMNS))


_Writer = Callable[[Path, Tensor, Fraction], None]
_WRITERS: tuple[_Writer, ...] = (write_video, _write_gif, _write_webp, _write_sheet)
WRITERS: dict[str, _Writer] = dict(zip(FRAME_SUFFIXES, _WRITERS, strict=True))


@contextmanager
def one_thread_workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool whose threads run each torch operation on one core.

    Operations on many threads wait for the slowest one at every layer; on cores shared with other
    programs that made a training step four times slower than independent workers.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # the workers also changed what later threads start with
