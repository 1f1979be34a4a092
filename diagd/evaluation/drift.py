"""Changes of a dream that goes on and on: quality by eights of frames, past the clip's end.

A clip ends after some tens of frames, a dream does not: once its actions are over they begin again.
PSNR and SSIM need the true frame of the same moment, so they end with the clip. All else is read
against true frames of any moment: what a walk looks like does not depend on how long it has lasted,
so the distance (TFD) of frames 249-256 to all true frames of all clips tells whether those frames
still look like this world. The reference is one for all eights, and each eight has equally many
frames of every clip; so neither makes TFD rise, drift does. The row of the truth shows what TFD is
without any drift, at this number of frames.
"""

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagd.evaluation.results import QUALITY, Record, Results, biased, grouped, unpack
from diagd.evaluation.tables import Column
from diagd.metrics.frechet import frechet_distance

DRIFT_FRAMES = 256  # dreamt where no other number is asked for
EIGHT = 8  # frames that a row of the table speaks of
FRAMES = Column("frames", "frames", "{0[0]}-{0[1]}", is_label=True)
SAMPLES = Column("samples", "samples", is_label=True)
COLUMNS = (
    (
        Column("tfd", "TFD", "{:.3f}", better="lower"),
        Column("psnr", "PSNR", "{:.2f}", better="higher"),
        Column("ssim", "SSIM", "{:.3f}", better="higher"),
        Column("lpips", "LPIPS", "{:.3f}", better="lower"),
    ),
    (
        Column("sharpness", "sharpness", "{:.2f}"),
        Column("repeated", "repeated", "{:.3f}"),
        Column("distinct", "distinct", "{:.3f}"),
    ),
)


def summarize_drift(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model, strategy and eight of frames.

    A row holds `frames`, the first and the last (from 1, after the given ones), `samples`, how many
    there are over all clips, and means over them, each None where it cannot be had: `tfd` against
    all true frames, quality against the true frames of the same moment, `sharpness` as a multiple
    of the true frames' mean, and the shares of `repeated` and `distinct` tokens (see
    `diagd.metrics.quality`).
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        truth = groups.get((model, "truth"), {})
        length = max(len(record["drift"]["sharpness"]) for record in clips.values())
        for start in range(0, length, EIGHT):
            end = min(start + EIGHT, length)
            row = {"model": model, "strategy": strategy, "frames": [start + 1, end]}
            rows.append(row | _eight(clips, truth, slice(start, end)))
    return rows


def _eight(clips: dict[str, Record], truth: dict[str, Record], frames: slice) -> dict[str, Any]:
    def mean(records: dict[str, Record], part: str, name: str, frames: slice) -> float | None:
        lists = (record[part].get(name, ())[frames] for record in records.values())
        values = list(chain(*lists))
        return float(np.mean(values)) if values else None

    row: dict[str, Any] = {name: mean(clips, "quality", name, frames) for name in QUALITY}
    row |= {name: mean(clips, "drift", name, frames) for name in ("repeated", "distinct")}
    sharpness = mean(clips, "drift", "sharpness", frames)
    usual = mean(truth, "drift", "sharpness", slice(None))
    row["sharpness"] = sharpness / usual if sharpness is not None and usual else None
    row["samples"] = sum(len(one["drift"]["sharpness"][frames]) for one in clips.values())
    features, reference = _features(clips, frames), _features(truth, slice(None))
    comparable = min(len(features), len(reference)) > 1
    row["tfd"] = frechet_distance(features, reference) if comparable else None
    return row


def _features(clips: dict[str, Record], frames: slice) -> NDArray[np.float32]:
    """Return the (N, D) features of some frames of all clips, N being 0 where there are none."""
    packed = (record["features"].get("tfd") for record in clips.values())
    found = [unpack(features)[frames] for features in packed if features]
    return np.concatenate(found) if found else np.empty((0, 0), np.float32)


def drift_notes(results: Results, rows: list[dict[str, Any]]) -> list[str]:
    """Explain the rows."""
    notes = [
        f"Every clip's first {results.runs[-1]['settings']['context_frames']} frames are given; "
        "where its actions are over, they begin again. PSNR and SSIM are against the true frame of "
        "the moment, as long as there is one.",
        "TFD is the Frechet distance of these frames to all true frames, in statistics of our own "
        "tokenizer's latents; the row of the truth shows what it is without drift.",
        "Sharpness (variance of the Laplacian) is a multiple of the true frames'. Repeated is the "
        "share of tokens equal to the frame before's, distinct how many ids a frame has a token. "
        "The truth shows what is right, the reconstruction what the tokenizer can show of it.",
    ]
    packed = [record["features"].get("tfd") for record in results.clips]
    dimension = max((unpack(features).shape[1] for features in packed if features), default=0)
    samples = min(row["samples"] for row in rows)
    return notes + [biased("tfd", samples, dimension)] * (samples <= dimension)
