"""Strips of frames and side-by-side videos from the clips that an evaluation kept; no torch."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import matplotlib.pyplot as plt
import numpy as np
from av.error import FFmpegError
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from diagd.files import replacing

Frames = NDArray[np.uint8]  # (T, H_px, W_px, 3)

STRIP_COLUMNS = 8
CELL_HEIGHT_PX = 200  # small frames are enlarged by whole factors up to about this
LABEL_HEIGHT_PX = 24
GAP_PX = 4


def read_frames(path: Path) -> Frames:
    """Decode a video.

    Raises:
        FileNotFoundError, ValueError: it is missing or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"video not found: {path}")
    try:
        with av.open(str(path)) as container:
            frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        return np.stack(frames).astype(np.uint8, copy=False)
    except (FFmpegError, IndexError, ValueError) as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from None


def write_strip(path: Path, rows: dict[str, Frames]) -> None:
    """Draw a few frames of each video in a row of its own, labelled, all at the same times."""
    length = min(len(frames) for frames in rows.values())
    times = np.unique(np.linspace(0, length - 1, min(length, STRIP_COLUMNS)).round().astype(int))
    height_px, width_px = next(iter(rows.values())).shape[1:3]
    cell = 1.5 * width_px / height_px, 1.5
    figure, axes = plt.subplots(
        len(rows),
        len(times),
        figsize=(cell[0] * len(times) + 1.2, cell[1] * len(rows) + 0.3),
        squeeze=False,
        layout="constrained",
    )
    for line, (label, frames) in zip(axes, rows.items(), strict=True):
        for axis, time in zip(line, times, strict=True):
            axis.imshow(frames[time])
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, fontsize=13)
    for axis, time in zip(axes[0], times, strict=True):
        axis.set_title(f"frame {time + 1}", fontsize=13)
    save_figure(figure, path, dpi=80)


def write_side_by_side(path: Path, cells: dict[str, Frames], fps: float) -> None:
    """Write one mp4 of all videos in a grid, a label above each."""
    height_px, width_px = next(iter(cells.values())).shape[1:3]
    factor = max(1, round(CELL_HEIGHT_PX / height_px))
    columns = min(len(cells), 3)
    length = min(len(frames) for frames in cells.values())
    blocks = []
    for label, frames in cells.items():
        large = frames[:length].repeat(factor, axis=1).repeat(factor, axis=2)
        head = np.broadcast_to(
            _label(label, width_px * factor), (length, LABEL_HEIGHT_PX, width_px * factor, 3)
        )
        block = np.concatenate([head, large], axis=1)
        blocks.append(
            np.pad(block, ((0, 0), (0, GAP_PX), (0, GAP_PX), (0, 0)), constant_values=255)
        )
    while len(blocks) % columns:
        blocks.append(np.full_like(blocks[0], 255))
    lines = [
        np.concatenate(blocks[start : start + columns], axis=2)
        for start in range(0, len(blocks), columns)
    ]
    _write_mp4(path, np.concatenate(lines, axis=1), fps)


def save_figure(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a figure as PNG, under its name only when it is whole, and close it."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")
    plt.close(figure)


def _label(text: str, width_px: int) -> Frames:
    """Draw a line of text: (LABEL_HEIGHT_PX, width_px, 3)."""
    figure = Figure(figsize=(width_px / 100, LABEL_HEIGHT_PX / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=9)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:LABEL_HEIGHT_PX, :width_px, :3]


def _write_mp4(path: Path, frames: Frames, fps: float) -> None:
    """Write H.264 that browsers play; both sizes are cut to even numbers."""
    options = {"movflags": "faststart"}
    with (
        replacing(path) as temporary,
        av.open(str(temporary), "w", format="mp4", options=options) as out,
    ):
        stream = out.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = (size // 2 * 2 for size in frames.shape[1:3])
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20", "x264-params": "threads=1:mbtree=0"}
        for frame in frames[:, : stream.height, : stream.width]:
            picture = np.ascontiguousarray(frame)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))
