"""What adapters recover of what finetuning does: price against steps, and the share recovered.

python runs/adapters_report.py --results work/adapters/results --out docs/results/adapters

RESULTS/WORLD/adapters holds the results of runs/arms.py's study `adapters`. Writes WORLD.json (a
row for each arm, number of steps and strategy), adapters.md and adapters.png.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import tyro

from diagd.files import read_json_lines, save_figure, write_json, write_text

STRATEGIES = ("raster", "k=1", "k=2")
UNTOUCHED = "untouched"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """Read RESULTS/WORLD/adapters/*.jsonl, and write tables and a figure."""

    results: Path = Path("work/adapters/results")
    out: Path = Path("docs/results/adapters")


def read_rows(folder: Path) -> Rows:
    """Return a row for each arm, number of steps and strategy, averaged over seeds.

    `change` is against the untouched world under the same strategy, `gap` the distance from the
    untouched world's raster order; all are judged on the same clips. Errors are over seeds, None
    for one. `recovered` is None where the change of all weights is within its error.
    """
    nll, about = dict[tuple[str, str], dict[int, float]](), dict[str, dict[str, Any]]()
    for path in sorted(folder.glob("*.jsonl")):
        if not path.name.endswith(".log.jsonl"):
            for row in read_json_lines(path):
                nll.setdefault((row["arm"], row["strategy"]), {})[row["seed"]] = row["nll"]
                about[row["arm"]] = row
    if (UNTOUCHED, "raster") not in nll:
        raise ValueError(f"{folder} has no results of the arm {UNTOUCHED}")
    base = {strategy: mean(nll[UNTOUCHED, strategy].values()) for strategy in STRATEGIES}
    rows: Rows = []
    for (arm, strategy), by_seed in nll.items():
        changes = [value - base[strategy] for value in by_seed.values()]
        name, _, steps = arm.rpartition("-")
        rows.append(
            {
                "arm": name or arm,
                "steps": int(steps) if name else 0,
                "strategy": strategy,
                "seeds": len(by_seed),
                **{key: about[arm][key] for key in ("clips", "device", "torch")},
                "trained": about[arm]["trained"],
                "share": about[arm]["trained"] / about[arm]["parameters"],
                "nll": mean(by_seed.values()),
                "change": mean(changes),
                "error": stdev(changes) if len(changes) > 1 else None,
                "gap": mean(by_seed.values()) - base["raster"],
            }
        )
    full = {
        (row["steps"], row["strategy"]): row["change"]
        for row in rows
        if row["arm"] == "full" and abs(row["change"]) > (row["error"] or 0)
    }
    for row in rows:
        of_all = full.get((row["steps"], row["strategy"]))
        row["recovered"] = row["change"] / of_all if of_all else None
    return sorted(rows, key=lambda row: (row["steps"], -row["trained"]))


def table(rows: Rows) -> str:
    """Return Markdown: prices of every arm, and its share of what all weights would change."""
    head = " | ".join(f"`{one}`" for one in STRATEGIES)
    lines = [
        "Nats a token above the untouched world in raster order; in brackets the share of what",
        "finetuning all weights for as long changes; `stand-in` and `both` feed their learnt",
        "embedding where rows start. ± is the deviation over seeds.",
        "",
        f"| arm | steps | trained | seeds | {head} |",
        "|---|---|---|---|" + "---|" * len(STRATEGIES),
    ]
    for arm, steps in dict.fromkeys((row["arm"], row["steps"]) for row in rows):
        own = {r["strategy"]: r for r in rows if (r["arm"], r["steps"]) == (arm, steps)}
        first = next(iter(own.values()))
        cells = [cell(own[one]) if one in own else "-" for one in STRATEGIES]
        share = f"{first['trained']:,} ({first['share']:.1%})"
        lines.append(f"| {arm} | {steps} | {share} | {first['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any]) -> str:
    error = "" if row["error"] is None else f" ± {row['error']:.4f}"
    recovered = row["recovered"]
    shown = "" if recovered is None or row["strategy"] == "raster" else f" ({recovered:.0%})"
    return f"{row['gap']:+.4f}{error}{shown}"


def draw(of_worlds: dict[str, Rows], path: Path) -> None:
    """Draw the gap of each arm against steps: a row for each world, a column for each strategy."""
    figure, axes = plt.subplots(
        len(of_worlds),
        len(STRATEGIES),
        figsize=(3.4 * len(STRATEGIES), 3.0 * len(of_worlds)),
        layout="constrained",
        squeeze=False,
    )
    arms = dict.fromkeys(row["arm"] for rows in of_worlds.values() for row in rows if row["steps"])
    colours = {arm: f"C{number}" for number, arm in enumerate(arms)}
    for line, (world, rows) in zip(axes, of_worlds.items(), strict=True):
        start = {row["strategy"]: row["gap"] for row in rows if row["arm"] == UNTOUCHED}
        for axis, strategy in zip(line, STRATEGIES, strict=True):
            for arm, colour in colours.items():
                own = [r for r in rows if (r["arm"], r["strategy"]) == (arm, strategy)]
                values = [start[strategy], *(row["gap"] for row in own)]
                axis.plot([0, *(r["steps"] for r in own)], values, marker=".", color=colour)
            axis.set(title=f"{world}, {strategy}", xlabel="steps")
            axis.grid(alpha=0.3)
        line[0].set(ylabel="nats a token above raster")
    place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "fontsize": 8}
    axes[0, -1].legend(axes[0, 0].lines, colours, **place)
    save_figure(figure, path)


def main(options: Options) -> None:
    """Write a JSON file for each world, the tables and the figure."""
    folders = sorted(options.results.glob("*/adapters"))
    if not folders:
        raise ValueError(f"{options.results}: expected WORLD/adapters from runs/arms.py, got none")
    of_worlds = {folder.parent.name: read_rows(folder) for folder in folders}
    sections = ["# What adapters recover of what finetuning does\n"]
    for world, rows in of_worlds.items():
        write_json(options.out / f"{world}.json", rows, indent=1)
        sections.append(f"## {world}\n\n{table(rows)}")
    draw(of_worlds, options.out / "adapters.png")
    write_text(options.out / "adapters.md", "\n".join(sections))


if __name__ == "__main__":
    main(tyro.cli(Options))
