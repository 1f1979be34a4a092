"""What belongs beside the numbers: weights, preprocessing, sample sizes, and what is missing."""

from typing import Any

from rich.console import Console

from diagd.console import print_tables
from diagd.evaluation.results import DISTANCES, QUALITY, Results


def metric_notes(results: Results, rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence or two for each thing to know about a table of these rows."""
    metrics = results.runs[-1]["metrics"]
    settings = results.runs[-1]["settings"]
    generated = settings["num_frames"] - settings["context_frames"]
    parts = []
    for name, flag in (("lpips", "--lpips-backbone"), ("fvd", "--fvd-detector")):
        if metrics[name] is None:
            parts.append(f"{name.upper()}: not available (n/a), no weights were given ({flag}).")
        else:
            words = ", ".join(f"{key} {value}" for key, value in metrics[name].items())
            parts.append(f"{name.upper()}: {words}.")
    if fvd := next((row["fvd"] for row in rows if row["fvd"]), None):
        parts.append(
            f"FVD compares {fvd['clips']} generated with as many real clips of {generated} frames "
            f"(the given frames are left out), in {fvd['dimension']} dimensions."
        )
    if tfd := next((row["tfd"] for row in rows if row["tfd"]), None):
        parts.append(
            "TFD is the tokenizer Frechet distance, not FVD: Frechet distance between real and "
            f"generated frames ({tfd['samples']} each) in {tfd['dimension']} statistics of our own "
            "tokenizer's latents (mean, spread and change to the frame before, of each channel). "
            "It is comparable only between rows that share a tokenizer."
        )
    else:
        parts.append("TFD: not available (n/a), the tokenizer gives no latents.")
    parts += [f"Warning: {warning}." for warning in warnings_of(rows)]
    dropped = max(
        (r["stats"]["num_dropped_frames"] for r in results.clips if r["stats"]), default=0
    )
    if dropped:
        parts.append(
            f"The context of a model was full: up to {dropped} of the oldest frames were forgotten "
            "on the way, and reading the others again is in the time."
        )
    workers = max(run["options"]["workers"] for run in results.runs)
    if workers > 1:
        parts.append(f"Speed was measured while {workers} workers shared the machine.")
    return parts


def warnings_of(rows: list[dict[str, Any]]) -> list[str]:
    """Say which distances rest on too few samples."""
    found = []
    for name in DISTANCES:
        few = [
            row[name]
            for row in rows
            if row[name] and row[name]["samples"] <= row[name]["dimension"]
        ]
        if few:
            samples, dimension = min((d["samples"], d["dimension"]) for d in few)
            found.append(
                f"{name.upper()} of {samples} samples in {dimension} dimensions is biased upwards: "
                f"a covariance needs at least {dimension + 1}"
            )
    return found


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
