"""What `runs/acceptance.py` measured, as a table: a column for each scenario and model."""

from typing import Any

import numpy as np

from diagd.evaluation.comparison import bootstrap_interval

STRATEGIES = "raster", "k=1"
CONTEXTS = 1, 2, 4, 7  # frames before one whose tokens are predicted
HORIZONS = 1, 8  # frames of a dream that are compared with the truth
STILL_DB = 40  # PSNR of a copy, over the first frames, of a clip whose player stands still


def table(rows: list[dict[str, Any]]) -> str:
    """Return the numbers as Markdown: means over clips with 95% bootstrap intervals."""
    lines = ["| | " + " | ".join(f"{row['scenario']}, {row['model']}" for row in rows) + " |"]
    lines += ["|---|" + "---|" * len(rows)]
    for name, cell in CELLS.items():
        lines.append(f"| {name} | " + " | ".join(cell(row) for row in rows) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Any, digits: int) -> str:
    """Spell the mean of (N,) values and its interval."""
    found = np.array(values, dtype=np.float64)
    low, high = bootstrap_interval(found) or (np.nan, np.nan)
    return f"{found.mean():+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def above_copy(row: dict[str, Any], strategy: str, horizon: int) -> str:
    """Spell by how many dB dreams are closer to the truth than a copy, in clips that move."""
    copies, moves = np.array(row["copy_psnr"])[:, horizon - 1], moving(row)
    ours = np.array(row["psnr"][strategy])[:, horizon - 1]
    return spread((ours - copies)[moves], 2)


def moving(row: dict[str, Any]) -> Any:
    """Return which clips move, (N,) bool: a copy of a picture that stands still is the truth."""
    return np.array(row["copy_psnr"])[:, : max(HORIZONS)].mean(1) < STILL_DB


def price(row: dict[str, Any]) -> str:
    """Spell what k=1 costs above raster, in nats a token."""
    ours, raster = (np.array(row["nats"][one]).mean(1) for one in ("k=1", "raster"))
    return spread(ours - raster, 4)


def context_pays(row: dict[str, Any]) -> str:
    """Spell what a token of the same frames costs after fewer and more others."""
    few, *_, many = (np.array(row["nats_after"][str(count)]) for count in CONTEXTS)
    means = " ".join(f"{np.mean(row['nats_after'][str(count)]):.3f}" for count in CONTEXTS)
    return f"{means}: {spread(many - few, 3)}"


def back(row: dict[str, Any], other: str) -> str:
    """Spell by how much the picture after the way back is closer than another."""
    found = row["revisit"]
    return spread(np.array(found["back"]) - np.array(found[other]), 2)


def right_way(row: dict[str, Any], recorded: str = "") -> str:
    """Spell in which share of turns, left and right, pictures move the right way."""
    left, right = (row["turns"][recorded + name] for name in ("left", "right"))
    moved = [shift > 0 for shift in left] + [shift < 0 for shift in right]
    return f"{100 * np.mean(moved):.0f}% of {len(moved)}" if moved else "none"


def drifted(row: dict[str, Any]) -> str:
    """Spell TFD of the first eight frames, of the last eight, and their ratio."""
    first, last = row["tfd"][0], row["tfd"][-1]
    return f"{first:.3f}, {last:.3f} ({last / first:.2f}x)"


CELLS = {
    "clips that move": lambda row: f"{moving(row).sum()} of {len(row['copy_psnr'])}",
    "tokenizer, PSNR, dB": lambda row: f"{np.mean(row['tokenizer_psnr']):.1f}",
    **{
        f"PSNR above a copy, frame {frame}, {one}": lambda row, one=one, frame=frame: above_copy(
            row, one, frame
        )
        for frame in HORIZONS
        for one in STRATEGIES
    },
    "left and right turn the right way": right_way,
    "the same, of recorded turns": lambda row: right_way(row, "recorded_"),
    "price of k=1, nats a token": price,
    f"nats a token after {', '.join(map(str, CONTEXTS))} frames": context_pays,
    "TFD, first and last eight, k=1": drifted,
    "PSNR after 8 away and back, above chance": lambda row: back(row, "chance"),
    "the same, above the turning point": lambda row: back(row, "turned"),
}
