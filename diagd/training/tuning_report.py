"""What `diagd tune` shows and leaves behind: tables, tune.json and plots."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from diagd.families.checkpoints import available_models, find_model
from diagd.families.own_format import write_defaults
from diagd.files import write_json
from diagd.training.curves import plot_frontier, plot_profiles
from diagd.training.tuning import Axis, TuneOptions


def print_tuning(document: dict[str, Any], options: TuneOptions) -> None:
    """Print what `tune` returned: candidates, their gaps by the axes asked for, the choice."""
    console, rows = Console(), document["rows"]
    title = f"{options.model}: steps against likelihood ({document['options']['clips']} clips)"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title)
    table.add_column("strategy", no_wrap=True)
    for header in ("steps", "speedup", "nats", "gap", "error", "best"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            str(row["num_steps"]),
            f"{row['speedup']:.1f}x",
            f"{row['nll']:.4f}",
            f"{row['gap']:+.4f}",
            f"{row['gap_error']:.4f}",
            "*" if row["frontier"] else "",
        )
    console.print(table)
    for axis in options.by:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=f"gap by {axis}")
        table.add_column("strategy", no_wrap=True)
        table.add_column(f"nats above raster, {axis} 0, 1, ...")
        for name, values in _profiles(rows, axis).items():
            table.add_row(name, " ".join(f"{value:+.3f}" for value in values))
        console.print(table)
    choice = document["choice"]
    console.print(
        f"within {options.tolerance} nats of raster: "
        + (choice["name"] if choice else "no strategy")
    )
    console.print(advise(document, options))


def advise(document: dict[str, Any], options: TuneOptions) -> str:
    """Say which command uses the answer, and which one keeps it."""
    choice = document["choice"]
    if choice is None:
        return f"next: a larger --tolerance, or diagd finetune --init {options.model}"
    use = f"next: diagd play --model {options.model} --strategy {choice['name']}"
    if options.model in available_models():
        return use
    if options.make_default:
        return f"next: diagd play --model {options.model}, which decodes so by default now"
    return f"{use}; the same diagd tune with --make-default lets {options.model} decode so always"


def make_default(document: dict[str, Any], options: TuneOptions) -> None:
    """Write the choice, if there is one, into the generation defaults of the model's folder."""
    if document["choice"] is None:
        return
    found = find_model(options.model)
    defaults = replace(found.family.defaults(found), decoding=document["choice"]["name"])
    write_defaults(found.path.parent, defaults)


def write_tuning(document: dict[str, Any], options: TuneOptions, folder: Path) -> None:
    """Write tune.json and the plots beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tune.json", document, indent=1)
    plot_frontier(folder / "tune.png", document["rows"], options.tolerance)
    for axis in options.by:
        plot_profiles(folder / f"tune_{axis}.png", axis, _profiles(document["rows"], axis))


def _profiles(rows: list[dict[str, Any]], axis: Axis) -> dict[str, list[float]]:
    """Pick, for each pair of lags, the row start that costs least."""
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        lags = row["row_lag"], row["frame_lag"]
        if lags not in best or row["gap"] < best[lags]["gap"]:
            best[lags] = row
    return {row["name"]: row[f"gap_by_{axis}"] for row in best.values()}
