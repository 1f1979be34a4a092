"""The arms of each study of runs/arms.py side by side: what each strategy costs, learning curves.

python runs/arms_report.py

docs/results/arms keeps arms.md and the columns of the study `scratch`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from torch import Tensor

from diagd import console
from diagd.files import read_json_lines, save_figure, write_text

CONTROL = "raster"  # the arm that all are compared with, and its strategy
PARTS = {"column 0": slice(0, 1), "1": slice(1, 2), "2 to 5": slice(2, 6), "6 on": slice(6, None)}
SMOOTH = 10  # lines of a log that are drawn as one


@dataclass(frozen=True)
class Options:
    """Read RESULTS/STUDY/*.jsonl; write arms.md, and STUDY-curves.png and STUDY-columns.png."""

    studies: tuple[str, ...] = ("scratch", "recipe", "row-starts")
    results: Path = Path("work/arms")


class Found:
    """Results of a study: rows by (arm, seed, strategy), and training losses by (arm, seed)."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[tuple[str, int, str], dict[str, Any]] = {}
        self.curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            if path.name.endswith(".log.jsonl"):
                continue
            for row in read_json_lines(path):
                run = row["arm"], row["seed"]
                self.rows[*run, row["strategy"]] = row
                self.curves[run] = read_json_lines(path.with_suffix(".log.jsonl"))
        self.arms = list(dict.fromkeys(arm for arm, _ in self.curves))
        if not self.arms:
            raise ValueError(f"{folder} has no results of arms")
        self.base = CONTROL if CONTROL in self.arms else self.arms[0]
        self.strategies = list(dict.fromkeys(strategy for _, _, strategy in self.rows))

    def price(self, arm: str, strategy: str) -> tuple[Tensor, int]:
        """Return (clips, columns) nats above the base in raster order, and over how many seeds.

        Each seed is compared with the base of the same seed, clip by clip.
        """
        gaps = [
            torch.tensor(row["by_clip_and_column"])
            - torch.tensor(self.rows[self.base, seed, CONTROL]["by_clip_and_column"])
            for (name, seed, one), row in self.rows.items()
            if (name, one) == (arm, strategy) and (self.base, seed, CONTROL) in self.rows
        ]
        return (torch.stack(gaps).mean(0), len(gaps)) if gaps else (torch.zeros(0, 0), 0)


def table(found: Found) -> str:
    """Return the prices as Markdown, with standard errors over clips."""
    base = [
        row["nll"]
        for (arm, _, strategy), row in found.rows.items()
        if (arm, strategy) == (found.base, CONTROL)
    ]
    raster = sum(base) / len(base)
    lines = [
        f"Nats a token above the arm `{found.base}` in raster order ({raster:.4f}), on the same",
        "held-out clips, paired; with the standard error over clips. Seeds are averaged. Then some",
        "columns alone.",
        "",
        f"| arm | seeds | strategy | all | {' | '.join(PARTS)} |",
        "|---|---|---|---|" + "---|" * len(PARTS),
    ]
    for arm in found.arms:
        for strategy in found.strategies:
            gap, seeds = found.price(arm, strategy)
            if seeds:
                cells = [cell(part) for part in (gap, *(gap[:, part] for part in PARTS.values()))]
                lines.append(f"| {arm} | {seeds} | {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(gap: Tensor) -> str:
    """Spell the mean of (clips, columns) and its standard error over clips."""
    by_clip = gap.mean(1)
    error = by_clip.std().item() / math.sqrt(len(by_clip)) if len(by_clip) > 1 else None
    return f"{by_clip.mean().item():+.4f} ± " + console.cell("{error:.4f}", {"error": error})


def draw_curves(found: Found, path: Path) -> None:
    """Draw the training loss of every arm; a mixture's is that of its strategies, as drawn."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, arm in enumerate(found.arms):
        for (name, _), lines in found.curves.items():
            if name != arm:
                continue
            parts = [lines[n : n + SMOOTH] for n in range(0, len(lines), SMOOTH)]
            steps = [part[-1]["step"] for part in parts]
            losses = [sum(line["loss"] for line in part) / len(part) for part in parts]
            axis.plot(steps, losses, color=f"C{number}", linewidth=1, label=arm)
            arm = ""  # one entry in the legend
    axis.set(xlabel="step", ylabel="training loss, nats a token")
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def draw_columns(found: Found, path: Path) -> None:
    """Draw, for each strategy, what its columns cost above raster of the arm raster."""
    figure, axes = plt.subplots(
        1,
        len(found.strategies),
        figsize=(3.2 * len(found.strategies), 3.4),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axis, strategy in zip(axes[0], found.strategies, strict=True):
        for number, arm in enumerate(found.arms):
            gap, seeds = found.price(arm, strategy)
            if seeds:
                values = gap.mean(0).tolist()
                axis.plot(values, color=f"C{number}", marker=".", linewidth=1, label=arm)
        axis.set(title=strategy, xlabel="column")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="nats a token above raster")
    axes[0, 0].legend(fontsize=8)
    save_figure(figure, path)


def main(options: Options) -> None:
    """Write the tables and the plots."""
    sections = ["# What each strategy costs a model trained under another\n"]
    for study in options.studies:
        found = Found(options.results / study)
        sections.append(f"## {study}\n\n{table(found)}")
        draw_curves(found, options.results / f"{study}-curves.png")
        draw_columns(found, options.results / f"{study}-columns.png")
    text = "\n".join(sections)
    write_text(options.results / "arms.md", text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Options))
