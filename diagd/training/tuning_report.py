"""What `diagd tune` shows and leaves behind: tables, tune.json and plots."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from diagd.console import make_console, print_table
from diagd.decoding.likelihood import spell_error
from diagd.families.checkpoints import available_models, find_model
from diagd.families.own_format import write_defaults
from diagd.files import write_json
from diagd.training.curves import plot_frontier, plot_profiles
from diagd.training.tuning_options import Axis, TuneOptions


def print_tuning(document: dict[str, Any], options: TuneOptions) -> None:
    """Print what `tune` returned: candidates, their gaps by the axes asked for, the choice."""
    console, rows = make_console(), document["rows"]
    title = f"{options.model}: steps against likelihood ({document['options']['clips']} clips)"
    lines = [
        [
            row["name"],
            str(row["num_steps"]),
            f"{row['speedup']:.1f}x",
            f"{row['nll']:.4f}",
            f"{row['gap']:+.4f}",
            spell_error(row["gap_error"]),
            "*" if row["frontier"] else "",
        ]
        for row in rows
    ]
    header = "strategy", "steps", "step ratio", "nats", "gap", "error", "best"
    print_table(console, title, header, lines)
    for axis in options.by:
        profiles = _profiles(rows, axis)
        lines = [[name, *(f"{v:+.3f}" for v in values)] for name, values in profiles.items()]
        header = ["strategy", *map(str, range(len(lines[0]) - 1))]
        print_table(console, f"nats above raster by {axis}", header, lines)
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
