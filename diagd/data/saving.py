"""Frames as a file of the kind that its name asks for: a video, an animation, a contact sheet."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
from av.filter import Graph
from torch import Tensor

from diagd.data.video import contact_sheet, write_image, write_video
from diagd.files import FRAME_SUFFIXES, check_suffix, replacing

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
