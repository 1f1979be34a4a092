"""Print what an evaluation came to as a table for the terminal."""

from typing import Any

from rich.console import Console

from diagd.console import print_tables
from diagd.evaluation.summary import DISTANCES, QUALITY

DIGITS = {"psnr": 2, "ssim": 3, "lpips": 3, "fvd": 0, "tfd": 3}
SPEED = {  # header and form of each; shown where there is any
    "frames_per_second": ("frames/s", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "num_steps": ("steps", "{:.0f}"),
    "fed_per_token": ("fed/token", "{:.2f}"),
    "equal_to_raster": ("= raster", "{:.1%}"),
}


def print_summary(rows: list[dict[str, Any]], console: Console) -> None:
    """Print quality, its difference to raster and speed of each row, models below each other."""
    shown = [name for name in (*QUALITY, *DISTANCES) if any(row[name] for row in rows)]
    speed = [name for name in SPEED if any(row[name] is not None for row in rows)]
    header = ["", "clips", *map(str.upper, shown), *(SPEED[name][0] for name in speed)]
    lines = [
        [
            row["method"],
            str(row["clips"]),
            *(_cell(row[name], DIGITS[name]) for name in shown),
            *("-" if row[n] is None else SPEED[n][1].format(row[n]) for n in speed),
        ]
        for row in rows
    ]
    print_tables(console, [row["model"] for row in rows], header, lines)


def _cell(value: dict[str, Any] | None, digits: int) -> str:
    """Show a mean with half the width of its interval, or a distance."""
    if value is None or value.get("value", 0) is None:
        return "-"
    if "value" in value:
        return f"{value['value']:.{digits}f}"
    interval = value["interval"]
    half = f" ±{(interval[1] - interval[0]) / 2:.{digits}f}" if interval else ""
    return f"{value['mean']:.{digits}f}{half}"
