"""Turn the benchmarks' JSON into speed.md and its pictures.

python runs/speed_report.py --results docs/results
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import tyro

from diagd.benchmark.bench import MARK, after, disturbed_note, is_disturbed, shown_columns
from diagd.console import cell
from diagd.files import save_figure, write_text

SPEED = {
    "steps": "{steps}",
    "seconds [min-max]": "{seconds:.2f} [{seconds_min:.2f}-{seconds_max:.2f}]",
    "ms a step": "{ms_per_step:.2f}",
    "p99": "{step_ms[p99]:.2f}",
    "frames/s": "{frames_per_second:.2f}",
    "over Hugging Face": "{over_hugging_face:.1f}x",
    "over raster": "{speedup:.1f}x",
    "fed a token": "{fed_per_token:.2f}",
    "= raster": "{tokens_equal_to_raster:.0%}",
    "step ratio": "{step_ratio:.1f}x",
    "efficiency": "{efficiency:.2f}",
    "first run, s": "{warm_up_seconds:.1f}",
}
LIMITS = {
    "MB read a step": "{megabytes_per_step:.0f}",
    "of bandwidth": "{bandwidth_share:.0%}",
    "MFLOP a step": "{megaflops_per_step:.0f}",
    "of peak": "{flops_share:.0%}",
    "linears, ms": "{parts_ms[linears]:.2f}",
    "attention, ms": "{parts_ms[attention]:.2f}",
    "forward, ms": "{parts_ms[forward]:.2f}",
    "sampling, ms": "{parts_ms[sampling]:.2f}",
    "other, ms": "{parts_ms[bookkeeping]:.2f}",
}


@dataclass(frozen=True)
class Options:
    """Read bench_*.jsonl (and precision.json) and write speed.md and speed_*.png."""

    results: Path


def main(options: Options) -> None:
    """Write the report."""
    lines = ["# Speed", ""]
    for path in sorted(options.results.glob("bench_*.jsonl")):
        documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        picture = f"speed_{path.stem.removeprefix('bench_')}.png"
        draw(documents, options.results / picture)
        lines += [f"Made by `runs/{path.stem}.sh` from `{path.name}`.", "", f"![]({picture})", ""]
        for document in documents:
            lines += describe(document)
    precision = options.results / "precision.json"
    if precision.is_file():
        lines += ["## What lower precision costs", "", "The world `maze` on held-out episodes,"]
        lines += ["teacher-forced (`runs/precision.py`).", ""]
        lines += [
            "| weights | loss, nats a token | likeliest token as in float32 |",
            "|---|---|---|",
        ]
        for name, row in json.loads(precision.read_text(encoding="utf-8")).items():
            share = row["likeliest_token_unchanged"]
            lines.append(f"| {name} | {row['loss']:.4f} | {share:.2%} |")
    write_text(options.results / "speed.md", "\n".join(lines).rstrip() + "\n")


def describe(document: dict[str, Any]) -> list[str]:
    """Return the heading and the tables of one benchmark."""
    given = document["options"]
    grid = "x".join(map(str, document["grid"]))
    warmth = given.get("temperature", 0)
    drawn = f"temperature {warmth:g}" if warmth else "greedy"
    counts = sorted({row["context_frames"] for row in document["rows"]})
    frames = " or ".join(map(str, counts)) + f" frame{'s' * (counts[-1] > 1)}"
    lines = [
        f"## {given['model']}, {document['parameters'] / 1e6:.1f}M parameters",
        "",
        f"{document['device']}, {document['threads']} threads, torch {document['torch']}; "
        f"grid {grid} after {frames}, {drawn}, the whole context allocated; "
        f"medians of {given['repeats']}.",
    ]
    lines += [
        f"{dtype}: the machine reads {ceiling['bytes_per_second'] / 1e9:.1f} GB/s (1 GiB, "
        f"streamed) and multiplies matrices{' of bfloat16 or float32' * (dtype == 'int8')} at "
        f"{ceiling['flops_per_second'] / 1e9:.0f} GFLOP/s."
        for dtype, ceiling in document["ceilings"].items()
    ]
    for texts in (SPEED, LIMITS):
        rows = [row for row in document["rows"] if texts is SPEED or "step_ms" in row]
        columns = shown_columns(texts, rows)
        lines += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in rows:
            cells = [cell(text, row) for text in columns.values()]
            mark = f" {MARK}" * is_disturbed(row)
            lines.append(f"| {name_of(row, document)}{mark} | " + " | ".join(cells) + " |")
    disturbed = [name_of(row, document) for row in document["rows"] if is_disturbed(row)]
    if disturbed:
        lines += ["", disturbed_note(disturbed)]
    return [*lines, ""]


def name_of(row: dict[str, Any], document: dict[str, Any]) -> str:
    """Name a row of the tables."""
    strategy = row["strategy"] + after(row, document["rows"])
    return " ".join(filter(None, (row["dtype"], row["backend"], strategy)))


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    """Draw frames a second of every row, a panel a benchmark."""
    heights = [len(document["rows"]) for document in documents]
    figure, axes = plt.subplots(
        len(documents),
        figsize=(8, 1.2 + 0.28 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    colours = {"hugging face": "tab:grey", "raster": "tab:orange"}
    for document, axis in zip(documents, axes[:, 0], strict=True):
        rows = document["rows"][::-1]
        rates = [row["frames_per_second"] for row in rows]
        fills = [colours.get(row["strategy"], "tab:blue") for row in rows]
        bars = axis.barh([name_of(row, document) for row in rows], rates, color=fills)
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.set_title(f"{document['options']['model']}: frames a second", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Options))
