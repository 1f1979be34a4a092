"""Print a summary as a table for the terminal."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from diagd.evaluation.statistics import DISTANCES, QUALITY

DIGITS = {"psnr": 2, "ssim": 3, "lpips": 3, "fvd": 0, "tfd": 3}


def print_summary(rows: list[dict[str, Any]], console: Console) -> None:
    """Print quality, its difference to raster and speed of each row, models below each other."""
    shown = [name for name in (*QUALITY, *DISTANCES) if any(row[name] for row in rows)]
    for model in dict.fromkeys(row["model"] for row in rows):
        table = Table(title=model, box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for name in ("clips", *shown, "frames/s", "tokens/s", "steps"):
            table.add_column(name.upper() if name in shown else name, justify="right")
        for row in rows:
            if row["model"] != model:
                continue
            speed = ("frames_per_second", 2), ("tokens_per_second", 0), ("num_steps", 0)
            table.add_row(
                row["method"],
                str(row["clips"]),
                *(_cell(row[name], DIGITS[name]) for name in shown),
                *("-" if row[name] is None else f"{row[name]:.{d}f}" for name, d in speed),
            )
        console.print(table)


def _cell(value: dict[str, Any] | None, digits: int) -> str:
    """Show a mean with half the width of its interval, or a distance."""
    if value is None or value.get("value", 0) is None:
        return "-"
    if "value" in value:
        return f"{value['value']:.{digits}f}"
    interval = value["interval"]
    half = f" ±{(interval[1] - interval[0]) / 2:.{digits}f}" if interval else ""
    return f"{value['mean']:.{digits}f}{half}"
