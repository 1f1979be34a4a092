"""What `diagd tune` shows and leaves behind: tables, tune.json and plots."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from diagd.files import write_json
from diagd.training.curves import plot_frontier, plot_profiles
from diagd.training.tuning import Axis, TuneOptions


def print_tuning(document: dict[str, Any], options: TuneOptions) -> None:
    """Print what `tune` returned: candidates, their gaps by the axes asked for, the choice."""
    console, rows = Console(), document["rows"]
    title = f"{options.model}: steps against likelihood ({options.clips} clips)"
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
