"""The two plots of a report: quality against speed, and quality against the horizon."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from diagd.evaluation.drift import SHOWN
from diagd.evaluation.results import BASELINES, RASTER
from diagd.evaluation.summary import DISTANCES, QUALITY, Groups, per_horizon
from diagd.reporting.pictures import save_figure
from diagd.reporting.tables import algorithm

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
            axis.plot(*line, lw=1, color=color, label=model)
            for row, speed, value in zip(points, speeds, values, strict=True):
                marker = MARKERS[_lossless(row)][0]
                axis.plot(speed, value, marker, color=color)
                offset = {"xytext": (4, 5), "textcoords": "offset points", "rotation": 30}
                axis.annotate(row["method"], (speed, value), fontsize=8, **offset)
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
    axes[0, 0].legend(fontsize=8)
    save_figure(figure, path)


def plot_horizons(groups: Groups, path: Path) -> None:
    """Draw quality frame by frame: a column for each model, a row for each metric."""
    models = list(dict.fromkeys(model for model, _ in groups))
    shown = [
        name
        for name in QUALITY
        if any(per_horizon(clips, name) is not None for clips in groups.values())
    ]
    figure, axes = plt.subplots(
        len(shown),
        len(models),
        figsize=(5.5 * len(models), 3.2 * len(shown)),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    for line, name in zip(axes, shown, strict=True):
        for axis, model in zip(line, models, strict=True):
            for (owner, method), clips in groups.items():
                values = per_horizon(clips, name)
                if owner != model or values is None:
                    continue
                times = np.arange(1, values.shape[1] + 1)
                style = {"color": SHADES[method], "ls": "--"} if method in SHADES else {}
                axis.plot(times, values.mean(axis=0), label=algorithm(method), lw=1.3, **style)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(AXES[name])
    _finish_horizons(figure, axes, models, path)


def plot_drift(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw how frames change, by eights: a column for each model, a row for each number."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    shown = [name for name in SHOWN if any(row[name] is not None for row in rows)]
    figure, axes = plt.subplots(
        len(shown),
        len(models),
        figsize=(7 * len(models), 2.6 * len(shown)),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    for line, name in zip(axes, shown, strict=True):
        for axis, model in zip(line, models, strict=True):
            own = [row for row in rows if row["model"] == model and row[name] is not None]
            for method in dict.fromkeys(row["method"] for row in own):
                points = [row for row in own if row["method"] == method]
                style = {"color": SHADES[method], "ls": "--"} if method in SHADES else {}
                times = [np.mean(row["frames"]) for row in points]
                values = [row[name] for row in points]
                axis.plot(times, values, marker=".", label=algorithm(method), lw=1.3, **style)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(AXES[name])
    _finish_horizons(figure, axes, models, path)


def _finish_horizons(figure: Any, axes: Any, models: list[str], path: Path) -> None:
    """Name models and times, and write the figure."""
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model)
    for axis in axes[-1]:
        axis.set_xlabel("frames after the given ones")
    axes[0, 0].legend(fontsize=8)
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
