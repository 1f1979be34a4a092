"""How a dream changes while it goes on and on: quality by eights of frames, past the clip's end.

A clip ends after some tens of frames, a dream does not: once its actions are over they begin again.
PSNR and SSIM need the true frame of the same moment, so they end with the clip. All else is read
against true frames of any moment: what a walk looks like does not depend on how long it has lasted,
so the distance (TFD) of frames 249-256 to all true frames of all clips tells whether those frames
still look like this world. The reference is one for all eights, and each eight has equally many
frames of every clip; so neither makes TFD rise, drift does. What TFD comes to without any drift, at
this number of frames, says the row of the truth. Knows no torch, as `summary`.
"""

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from diagd.console import print_tables
from diagd.evaluation.results import QUALITY, Record, Results, grouped, unpack
from diagd.metrics.frechet import frechet_distance

DRIFT_FRAMES = 256  # dreamt where no other number is asked for
EIGHT = 8  # frames that a row of the table speaks of
DIGITS = {  # of the numbers of a row, as they are shown
    **{"tfd": 3, "psnr": 2, "ssim": 3, "lpips": 3},
    **{"sharpness": 2, "repeated": 3, "distinct": 3},
}
SHOWN = tuple(DIGITS)


def summarize_drift(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model, method and eight of frames.

    A row holds `frames`, the first and the last (from 1, after the given ones), `samples`, how many
    there are over all clips, and means over them, each None where it cannot be had: `tfd` against
    all true frames, quality against the true frames of the same moment, `sharpness` as a multiple
    of the true frames' mean, and the shares of `repeated` and `distinct` tokens (see
    `diagd.metrics.quality`).
    """
    groups = grouped(results)
    return [
        {"model": model, "method": method, "frames": [start + 1, min(start + EIGHT, length)]}
        | _eight(clips, groups.get((model, "truth"), {}), start)
        for (model, method), clips in groups.items()
        for length in [max(len(record["drift"]["sharpness"]) for record in clips.values())]
        for start in range(0, length, EIGHT)
    ]


def _eight(clips: dict[str, Record], truth: dict[str, Record], start: int) -> dict[str, Any]:
    """Return the numbers of the frames from `start` on."""

    def mean(part: str, name: str) -> float | None:
        lists = [record[part].get(name, ())[start : start + EIGHT] for record in clips.values()]
        values = list(chain(*lists))
        return float(np.mean(values)) if values else None

    row: dict[str, Any] = {name: mean("quality", name) for name in QUALITY}
    row |= {name: mean("drift", name) for name in ("repeated", "distinct")}
    true_sharpness = list(chain(*(record["drift"]["sharpness"] for record in truth.values())))
    sharpness, usual = mean("drift", "sharpness"), sum(true_sharpness) / max(1, len(true_sharpness))
    row["sharpness"] = sharpness / usual if sharpness is not None and usual else None
    now = [record["drift"]["sharpness"][start : start + EIGHT] for record in clips.values()]
    row["samples"] = len(list(chain(*now)))
    features, reference = _features(clips, slice(start, start + EIGHT)), _features(truth)
    comparable = min(len(features), len(reference)) > 1
    row["tfd"] = frechet_distance(features, reference) if comparable else None
    return row


def _features(clips: dict[str, Record], frames: slice = slice(None)) -> NDArray[np.float32]:
    """Return the (N, D) features of some frames of all clips, N being 0 where there are none."""
    found = [
        unpack(record["features"]["tfd"])[frames]
        for record in clips.values()
        if "tfd" in record["features"]
    ]
    return np.concatenate(found) if found else np.empty((0, 0), np.float32)


def is_drift(results: Results) -> bool:
    """Say whether these are results of `diagd evaluate --drift`."""
    return bool(results.runs and results.runs[-1]["settings"].get("drift"))


def print_drift(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table for each model."""
    print_tables(console, [row["model"] for row in rows], *drift_cells(rows), num_labels=2)


def drift_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header of the table, from the method on, and the cells of each row."""
    shown = [name for name in SHOWN if any(row[name] is not None for row in rows)]
    words = {name: name.upper() for name in ("tfd", *QUALITY)}
    header = ["method", "frames", "samples", *(words.get(name, name) for name in shown)]
    cells = [
        [row["method"], "{}-{}".format(*row["frames"]), str(row["samples"])]
        + ["-" if row[name] is None else f"{row[name]:.{DIGITS[name]}f}" for name in shown]
        for row in rows
    ]
    return header, cells


def drift_notes(results: Results, rows: list[dict[str, Any]]) -> list[str]:
    """Return what to know about a table of these rows."""
    settings = results.runs[-1]["settings"]
    parts = [
        f"Every clip's first {settings['context_frames']} frames are given; where its actions are "
        "over, they begin again. PSNR and SSIM are against the true frame of the moment, as long "
        "as there is one.",
        "TFD is the Frechet distance of these frames to all true frames, in statistics of our own "
        "tokenizer's latents; the row of the truth says what it is without drift.",
        "Sharpness (variance of the Laplacian) is a multiple of the true frames'. Repeated is the "
        "share of tokens equal to the frame before's, distinct how many ids a frame has a token. "
        "The truth shows what is right, the reconstruction what the tokenizer can show of it.",
    ]
    dimensions = {
        unpack(record["features"]["tfd"]).shape[1]
        for record in results.clips
        if "tfd" in record["features"]
    }
    few = min(row["samples"] for row in rows)
    if dimensions and few <= max(dimensions):
        parts.append(
            f"Warning: TFD of {few} samples in {max(dimensions)} dimensions is biased upwards: a "
            f"covariance needs at least {max(dimensions) + 1}."
        )
    return parts
