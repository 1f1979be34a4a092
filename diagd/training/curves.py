"""Curves of training: the loss over steps, and what schedules cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from diagd.files import read_json_lines, replacing


def plot_loss(folder: Path) -> None:
    """Draw a training run's log.jsonl as loss.png, with the held-out loss where it was measured."""
    lines = read_json_lines(folder / "log.jsonl")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training"), ("validation_loss", "o-", "held out")):
        shown = [(line["step"], line[key]) for line in lines if key in line]
        if shown:
            axis.plot(*zip(*shown, strict=True), style, linewidth=1, markersize=4, label=label)
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.legend()
    axis.grid(alpha=0.3)
    _save(figure, folder / "loss.png")


def plot_dreams(path: Path, rows: Mapping[str, Path], num_given: int) -> None:
    """Draw strips of frames below each other.

    Args:
        rows: picture files under their labels.
        num_given: frames at the start of each strip that were given to the model.
    """
    pictures = {label: plt.imread(picture) for label, picture in rows.items()}
    height, width = next(iter(pictures.values())).shape[:2]
    figure, axes = plt.subplots(
        len(rows),
        figsize=(9, 0.4 + len(rows) * 8 * height / width),
        layout="constrained",
        squeeze=False,
    )
    for axis, (label, picture) in zip(axes[:, 0], pictures.items(), strict=True):
        axis.imshow(picture, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    plural = "s" if num_given > 1 else ""
    axes[0, 0].set_title(f"{num_given} frame{plural} given, the others dreamt", fontsize=9)
    _save(figure, path)


def plot_frontier(path: Path, rows: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Draw the gap of schedules over their steps, as `diagd tune` reports them."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row_start in dict.fromkeys(row["row_start"] for row in rows):
        own = [row for row in rows if row["row_start"] == row_start]
        axis.errorbar(
            *zip(*[(row["num_steps"], row["gap"]) for row in own], strict=True),
            yerr=[row["gap_error"] or 0.0 for row in own],
            fmt="o",
            markersize=4,
            capsize=2,
            label=row_start or "raster",
        )
    frontier = sorted(
        (row["num_steps"], row["gap"], row["name"]) for row in rows if row["frontier"]
    )
    axis.plot(*zip(*[point[:2] for point in frontier], strict=True), color="gray", linewidth=1)
    for steps, gap, name in frontier:
        axis.annotate(name, (steps, gap), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axis.axhline(tolerance, color="black", linewidth=0.8, linestyle="--")
    axis.set(xlabel="steps", ylabel="nats a token above raster", xscale="log")
    axis.grid(alpha=0.3)
    axis.legend(title="row start")
    _save(figure, path)


def plot_profiles(path: Path, axis_name: str, profiles: Mapping[str, Sequence[float]]) -> None:
    """Draw the gap of schedules over frames, rows or columns."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in profiles.items():
        axis.plot(range(len(values)), values, marker=".", linewidth=1, label=name)
    axis.set(xlabel=axis_name, ylabel="nats a token above raster")
    axis.grid(alpha=0.3)
    axis.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)
