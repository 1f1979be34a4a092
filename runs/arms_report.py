"""The arms of runs/arms_doom.py side by side: learning curves, and what each strategy costs.

python runs/arms_report.py --results docs/results/arms
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from torch import Tensor

from diagd.files import read_json_lines, replacing, write_text

SMOOTH = 10  # lines of a log that are drawn as one


@dataclass(frozen=True)
class Options:
    """Read RESULTS/*.jsonl; write arms.md, curves.png and columns.png there."""

    results: Path = Path("docs/results/arms")


class Found:
    """Results of arms: rows by (arm, seed, strategy), and training losses by (arm, seed)."""

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
        if not any(arm == "raster" for arm, _ in self.curves):
            raise ValueError(f"{folder} has no results of the arm raster to compare with")
        self.arms = list(dict.fromkeys(arm for arm, _ in self.curves))
        self.strategies = list(dict.fromkeys(strategy for _, _, strategy in self.rows))

    def price(self, arm: str, strategy: str) -> tuple[Tensor, int]:
        """Return (clips,) nats above raster of the arm raster, and over how many seeds.

        Each seed is compared with the raster arm of the same seed, clip by clip.
        """
        gaps = [
            torch.tensor(row["by_clip"])
            - torch.tensor(self.rows["raster", seed, "raster"]["by_clip"])
            for (name, seed, one), row in self.rows.items()
            if (name, one) == (arm, strategy) and ("raster", seed, "raster") in self.rows
        ]
        return (torch.stack(gaps).mean(0), len(gaps)) if gaps else (torch.zeros(0), 0)


def table(found: Found) -> str:
    """Return the prices as Markdown, with standard errors over clips."""
    lines = [
        "Nats a token above the arm `raster` in raster order, on the same held-out clips, paired;",
        "with the standard error over clips. Seeds are averaged.",
        "",
        "| arm | seeds | " + " | ".join(found.strategies) + " |",
        "|---|---|" + "---|" * len(found.strategies),
    ]
    for arm in found.arms:
        cells, seeds = [], 0
        for strategy in found.strategies:
            gaps, seeds = found.price(arm, strategy)
            error = gaps.std().item() / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            cells.append(f"{gaps.mean().item():+.4f} ± {error:.4f}" if seeds else "")
        lines.append(f"| {arm} | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
    axis.set(xlabel="step", ylabel="training loss, nats a token", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


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
            gaps = [
                torch.tensor(row["by_column"])
                - torch.tensor(found.rows["raster", seed, "raster"]["by_column"])
                for (name, seed, one), row in found.rows.items()
                if (name, one) == (arm, strategy) and ("raster", seed, "raster") in found.rows
            ]
            if gaps:
                values = torch.stack(gaps).mean(0).tolist()
                axis.plot(values, color=f"C{number}", marker=".", linewidth=1, label=arm)
        axis.set(title=strategy, xlabel="column")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="nats a token above raster")
    axes[0, 0].legend(fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


def main(options: Options) -> None:
    """Write the table and the plots."""
    found = Found(options.results)
    write_text(options.results / "arms.md", table(found))
    draw_curves(found, options.results / "curves.png")
    draw_columns(found, options.results / "columns.png")
    print(table(found))


if __name__ == "__main__":
    main(tyro.cli(Options))
