"""Say what finetuning closed of the gap: `diagd tune` before and after, side by side.

python runs/finetune_report.py --results work/maze/finetune
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from diagd import console
from diagd.files import write_text


@dataclass(frozen=True)
class Options:
    """Read DIR/*/tune.json, all against the raster order of one model."""

    results: Path  # folder with a folder for each model, maze being the one before finetuning
    before: str = "maze"  # the model before


def main(options: Options) -> None:
    """Write finetune.md: nats above the first model's raster, and the share that is closed.

    Folders without one of the first model's strategies are of other studies, and left out.
    """
    found = {}
    for path in sorted(options.results.glob("*/tune.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found[path.parent.name] = {row["name"]: row for row in rows}
    before = found[options.before]
    found = {model: rows for model, rows in found.items() if before.keys() <= rows.keys()}
    first = next(iter(before.values()))
    raster = first["nll"] - first["gap"]
    lines = [
        f"Nats a token above {options.before} in raster order ({raster:.4f}), and the share of the",
        "gap closed.",
        "",
        "| strategy | steps | " + " | ".join(found) + " |",
        "|---|---|" + "---|" * len(found),
    ]
    for name, row in before.items():
        cells = []
        for model, rows in found.items():
            gap = rows[name]["gap"]
            cell = f"{gap:+.4f} ± " + console.cell("{gap_error:.4f}", rows[name])
            if model != options.before and row["gap"] > 0:
                cell += f" ({1 - gap / row['gap']:.0%})"
            cells.append(cell)
        lines.append(f"| {name} | {row['num_steps']} | " + " | ".join(cells) + " |")
    write_text(options.results / "finetune.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Options))
