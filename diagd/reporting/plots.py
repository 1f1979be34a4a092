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
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from diagd.evaluation.drift import SHOWN
from diagd.evaluation.results import BASELINES, DISTANCES, QUALITY, RASTER, Groups, per_horizon
from diagd.files import replacing
from diagd.reporting.tables import algorithm

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


AXES = {
    "psnr": "PSNR, dB (higher is better)",
    "ssim": "SSIM (higher is better)",
    "lpips": "LPIPS (lower is better)",
    "fvd": "FVD (lower is better)",
    "tfd": "TFD (lower is better)",
    "sharpness": "sharpness, of true frames'",
    "repeated": "share of repeated tokens",
    "distinct": "share of distinct tokens",
}
MARKERS = {  # of a strategy that is lossless so: marker, words
    "tokens": ("o", "raster's tokens"),
    "distribution": ("D", "raster's distribution, other tokens"),
    "no": ("x", "neither"),
}
JOINED = (RASTER, "k=")
SHADES = {"chance": "0.8", "truth": "0", "reconstruction": "0.35", "copy": "0.6"}


def plot_frontier(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what speed costs: a colour for each model, a point for each strategy.

    Lossless strategies are marked; a line joins raster and the diagonals.
    """
    shown = [name for name in (*QUALITY, *DISTANCES) if any(row[name] for row in rows)]
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4.6 * len(shown), 4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], shown, strict=True):
        for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            color = f"C{number}"
            points = [
                row
                for row in rows
                if row["model"] == model and row["method"] not in BASELINES and row[name]
            ]
            points.sort(key=lambda row: row["frames_per_second"])
            speeds = [row["frames_per_second"] for row in points]
            values = [_value(row[name]) for row in points]
            bars = _bars(points, name)
            axis.errorbar(speeds, values, bars, fmt="none", capsize=3, elinewidth=1, color=color)
            joined = [n for n, row in enumerate(points) if row["method"].startswith(JOINED)]
            line = [speeds[n] for n in joined], [values[n] for n in joined]
            label = model if axis is axes[0, 0] else None
            axis.plot(*line, lw=1, color=color, label=label)
            for n, (row, speed, value) in enumerate(zip(points, speeds, values, strict=True)):
                marker = MARKERS[_lossless(row)][0]
                axis.plot(speed, value, marker, color=color)
                up, va = ((-1, "top"), (1, "bottom"))[n % 2]  # neighbours on different sides
                style = {"textcoords": "offset points", "rotation": 30 * up, "va": va}
                where = (speed, value), (4, 5 * up)
                axis.annotate(row["method"], *where, fontsize=8, **style)
        axis.set(xscale="log", xlabel="frames a second", ylabel=AXES[name])
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.15, y=0.15)
        axis.grid(alpha=0.3, which="both")
    kinds = {_lossless(row) for row in rows if row["method"] not in BASELINES}
    for kind, (marker, words) in MARKERS.items():
        if kind in kinds and len(kinds) > 1:
            axes[0, 0].plot([], [], marker, color="0.4", label=words)
    figure.legend(loc="outside lower center", ncols=2 * len(shown), fontsize=8)
    save_figure(figure, path)


def plot_horizons(groups: Groups, path: Path) -> None:
    """Draw quality frame by frame: a column for each model, a row for each metric."""
    shown = [
        name
        for name in QUALITY
        if any(per_horizon(clips, name) is not None for clips in groups.values())
    ]
    models = list(dict.fromkeys(model for model, _ in groups))
    figure, panels = _panels(models, shown, (5.5, 3.2))
    for (model, method), clips in groups.items():
        for name in shown:
            values = per_horizon(clips, name)
            if values is not None:
                times = np.arange(1, values.shape[1] + 1)
                _draw_method(panels[model, name], method, times, values.mean(axis=0))
    _finish_panels(figure, panels, path)


def plot_drift(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw how frames change, by eights: a column for each model, a row for each number."""
    shown = [name for name in SHOWN if any(row[name] is not None for row in rows)]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = _panels(models, shown, (7, 2.6))
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        own = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        for name in shown:
            points = [row for row in own if row[name] is not None]
            times = [np.mean(row["frames"]) for row in points]
            values = [row[name] for row in points]
            _draw_method(panels[model, name], method, times, values, marker=".")
    _finish_panels(figure, panels, path)


def _panels(
    models: list[str], shown: list[str], inches: tuple[float, float]
) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Return a figure and its axes by (model, name of what is shown), each so wide and high."""
    figure, axes = plt.subplots(
        len(shown),
        len(models),
        figsize=(inches[0] * len(models), inches[1] * len(shown)),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    for line, name in zip(axes, shown, strict=True):
        line[0].set_ylabel(AXES[name])
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model)
    for axis in axes[-1]:
        axis.set_xlabel("frames after the given ones")
    return figure, {
        (model, name): axes[row, column]
        for row, name in enumerate(shown)
        for column, model in enumerate(models)
    }


def _draw_method(axis: Any, method: str, times: Any, values: Any, **style: Any) -> None:
    if method in SHADES:
        style |= {"color": SHADES[method], "ls": "--"}
    axis.plot(times, values, label=algorithm(method), lw=1.3, **style)


def _finish_panels(figure: Any, panels: dict[tuple[str, str], Any], path: Path) -> None:
    for axis in panels.values():
        axis.grid(alpha=0.3)
    next(iter(panels.values())).legend(fontsize=8)
    save_figure(figure, path)


def _lossless(row: dict[str, Any]) -> str:
    return row["lossless"] or ("tokens" if row["method"] == RASTER else "no")


def _value(summary: dict[str, Any]) -> float:
    return summary["value"] if "value" in summary else summary["mean"]


def _bars(points: list[dict[str, Any]], name: str) -> Any:
    """Return the (2, N) lengths of error bars of paired differences; None where there are none."""
    if name in DISTANCES:
        return None
    lengths = []
    for row in points:
        difference, edges = row[name]["difference"], row[name]["difference_interval"]
        lengths.append([difference - edges[0], edges[1] - difference] if edges else [0, 0])
    return np.array(lengths).T.clip(min=0)
