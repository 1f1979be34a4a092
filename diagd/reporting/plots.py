"""Plots of an evaluation, and strips and side-by-side videos of the clips it kept."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from diagd.data.video import write_video
from diagd.evaluation.comparison import METRICS
from diagd.evaluation.results import BASELINES, RASTER, Groups, per_horizon
from diagd.evaluation.tables import Column, Row, Table
from diagd.files import save_figure

Frames = NDArray[np.uint8]  # (T, H_px, W_px, 3)

STRIP_COLUMNS = 8
CELL_HEIGHT_PX = 200  # small frames are enlarged by whole factors up to about this
LABEL_HEIGHT_PX = 24
GAP_PX = 4


def write_strip(path: Path, rows: dict[str, Frames]) -> None:
    """Draw a few frames of each video in a row of its own, labelled, all at the same times."""
    length = min(len(frames) for frames in rows.values())
    times = np.unique(np.linspace(0, length - 1, min(length, STRIP_COLUMNS)).round().astype(int))
    height_px, width_px = next(iter(rows.values())).shape[1:3]
    cell = 1.5 * width_px / height_px, 1.5
    size = cell[0] * len(times) + 1.2, cell[1] * len(rows) + 0.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(times), squeeze=False)
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
        head = _label(label, width_px * factor)[None].repeat(length, axis=0)
        block = np.concatenate([head, large], axis=1)
        gaps = (0, 0), (0, GAP_PX), (0, GAP_PX), (0, 0)
        blocks.append(np.pad(block, gaps, constant_values=255))
    blocks += [np.full_like(blocks[0], 255)] * (-len(blocks) % columns)
    lines = [
        np.concatenate(blocks[start : start + columns], axis=2)
        for start in range(0, len(blocks), columns)
    ]
    whole = np.concatenate(lines, axis=1)
    even_height, even_width = (size // 2 * 2 for size in whole.shape[1:3])
    write_video(path, torch.from_numpy(whole[:, :even_height, :even_width]), fps, crf=20)


def _label(text: str, width_px: int) -> Frames:
    """Draw a line of text: (LABEL_HEIGHT_PX, width_px, 3)."""
    figure = Figure(figsize=(width_px / 100, LABEL_HEIGHT_PX / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=9)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:LABEL_HEIGHT_PX, :width_px, :3]


MARKERS = {  # of a strategy that is lossless so: marker, label
    "tokens": ("o", "raster's tokens"),
    "distribution": ("D", "raster's distribution, other tokens"),
    "no": ("x", "neither"),
}
JOINED = (RASTER, "k=")
SHADES = {"chance": "0.8", "truth": "0", "reconstruction": "0.35", "copy": "0.6"}


def plot_frontier(rows: list[Row], path: Path) -> None:
    """Draw what speed costs: a colour for each model, a point for each strategy.

    Lossless strategies are marked; a line joins raster and the diagonals.
    """
    table = Table(METRICS, [row for row in rows if row["strategy"] not in BASELINES])
    width = len(table.columns)
    figure = Figure(figsize=(4.6 * width, 4), layout="constrained")
    axes = figure.subplots(1, width, squeeze=False)
    models = dict.fromkeys(row["model"] for row in table.rows)
    for axis, column in zip(axes[0], table.columns, strict=True):
        for number, model in enumerate(models):
            points = [
                row for row in table.rows if row["model"] == model and column.value(row) is not None
            ]
            points.sort(key=lambda row: row["frames_per_second"])
            _draw_frontier(axis, points, column, f"C{number}", model)
        axis.set(xscale="log", xlabel="frames a second", ylabel=_axis_label(column))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.15, y=0.15)
        axis.grid(alpha=0.3, which="both")
    kinds = {row["lossless"] for row in table.rows}
    for kind, (marker, words) in MARKERS.items():
        if kind in kinds and len(kinds) > 1:
            axes[0, 0].plot([], [], marker, color="0.4", label=words)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": 2 * width, "fontsize": 8}
    figure.legend(handles, labels, **place)
    save_figure(figure, path)


def _draw_frontier(axis: Any, points: list[Row], column: Column, color: str, model: str) -> None:
    """Draw the points of a model, with bars of the paired difference to raster."""
    speeds = [row["frames_per_second"] for row in points]
    values = [column.value(row) for row in points]
    bars = np.zeros((2, len(points)))
    for bar, row in zip(bars.T, points, strict=True):
        metric = row[column.key.split(".")[0]]
        if edges := metric.get("difference_interval"):
            bar[:] = metric["difference"] - edges[0], edges[1] - metric["difference"]
    axis.errorbar(speeds, values, bars.clip(min=0), fmt="none", capsize=3, lw=1, color=color)
    joined = [n for n, row in enumerate(points) if row["strategy"].startswith(JOINED)]
    line = [speeds[n] for n in joined], [values[n] for n in joined]
    axis.plot(*line, lw=1, color=color, label=model)
    for n, (row, speed, value) in enumerate(zip(points, speeds, values, strict=True)):
        axis.plot(speed, value, MARKERS[row["lossless"]][0], color=color)
        up, va = ((-1, "top"), (1, "bottom"))[n % 2]  # neighbours on different sides
        style = {"textcoords": "offset points", "rotation": 30 * up, "va": va}
        axis.annotate(row["strategy"], (speed, value), (4, 5 * up), fontsize=8, **style)


def plot_horizons(groups: Groups, path: Path) -> None:
    """Draw quality frame by frame: a column for each model, a row for each metric."""
    curves: Curves = {}
    for column in METRICS:
        name = column.key.split(".")[0]
        for (model, strategy), clips in groups.items():
            values = per_horizon(clips, name)
            if values is not None:
                times = np.arange(1, values.shape[1] + 1)
                curves.setdefault((model, column), {})[strategy] = times, values.mean(axis=0)
    _draw_curves(curves, (5.5, 3.2), path)


def plot_drift(table: Table, path: Path) -> None:
    """Draw how frames change, by eights: a column for each model, a row for each number."""
    curves: Curves = {}
    for column in table.columns:
        for row in () if column.is_label else table.rows:
            if column.value(row) is not None:
                own = curves.setdefault((row["model"], column), {})
                times, values = own.setdefault(row["strategy"], ([], []))
                times.append(np.mean(row["frames"]))
                values.append(column.value(row))
    _draw_curves(curves, (7, 2.6), path, marker=".")


# (model, column) -> strategy -> times and values
Curves = dict[tuple[str, Column], dict[str, tuple[Any, Any]]]


def _draw_curves(curves: Curves, inches: tuple[float, float], path: Path, **style: Any) -> None:
    """Draw each model's curves below its name, each panel so wide and high."""
    models = list(dict.fromkeys(model for model, _ in curves))
    columns = list(dict.fromkeys(column for _, column in curves))
    size = inches[0] * len(models), inches[1] * len(columns)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(columns), len(models), squeeze=False, sharex=True, sharey="row")
    for (model, column), own in curves.items():
        axis = axes[columns.index(column), models.index(model)]
        for strategy, points in own.items():
            shade = {"color": SHADES[strategy], "ls": "--"} if strategy in SHADES else {}
            axis.plot(*points, label=strategy, lw=1.3, **style, **shade)
    for line, column in zip(axes, columns, strict=True):
        line[0].set_ylabel(_axis_label(column))
    for model, axis in zip(models, axes[0], strict=True):
        axis.set_title(model)
    for axis in axes[-1]:
        axis.set_xlabel("frames after the given ones")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    save_figure(figure, path)


def _axis_label(column: Column) -> str:
    return f"{column.heading} ({column.better} is better)" if column.better else column.heading
