"""From clip lines to the table: means with bootstrap intervals, differences to raster, distances.

Intervals are percentile bootstraps over clips (Efron 1979), 95%; differences to raster are paired:
the same clips with the same seeds. Knows no torch, so reports are instant.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagd.evaluation.results import BASELINES, RASTER, Record, Results, unpack
from diagd.metrics.frechet import frechet_distance

QUALITY = ("psnr", "ssim", "lpips")
DISTANCES = ("fvd", "tfd")
RESAMPLES = 10_000
LEVEL = 0.95

Groups = dict[tuple[str, str], dict[str, Record]]  # (model, method) -> clip -> its line


def grouped(results: Results) -> Groups:
    """Sort clip lines by (model, method): raster, other strategies by falling steps, baselines."""
    models = dict.fromkeys(label for run in results.runs for label in run["models"])
    groups: Groups = {}
    for record in sorted(results.clips, key=lambda record: record["clip"]):
        key = record["model"], record["method"]
        groups.setdefault(key, {})[record["clip"]] = record
    ranked = sorted(groups, key=lambda key: _rank(key[1], groups[key]))
    return {key: groups[key] for model in models for key in ranked if key[0] == model}


def _rank(method: str, clips: dict[str, Record]) -> tuple[bool, bool, float, str]:
    steps = _speed(clips)["num_steps"] or 0.0
    return method in BASELINES, method != RASTER, -steps, method


def bootstrap_interval(values: NDArray[np.float64], seed: int = 0) -> list[float] | None:
    """Return the 95% interval of the mean of (N,) values; None of fewer than two."""
    if len(values) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    edges = np.quantile(values[draws].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return edges.tolist()


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return one row for each (model, method) but the truth.

    A row holds `clips`; for each metric `{"mean", "interval", "difference", "difference_interval"}`
    (the last two against raster of the same model on the clips both have); for each distance
    `{"value", "samples", "dimension", "clips"}`. For a strategy there are medians of speed,
    `fed_per_token`, `equal_to_raster` (share of tokens, over all clips that raster was run on) and
    `lossless` (see `Strategy.promise`); the last three are None in results that were measured
    without them.
    """
    groups = grouped(results)
    rows = []
    for (model, method), clips in groups.items():
        if method == "truth":
            continue
        raster = groups.get((model, RASTER), {}) if method != RASTER else {}
        truth = groups.get((model, "truth"), {})
        row: dict[str, Any] = {"model": model, "method": method, "clips": len(clips)}
        row |= {metric: _quality(metric, clips, raster) for metric in QUALITY}
        row |= {name: _distance(name, clips, truth) for name in DISTANCES}
        row |= _speed(clips)
        row["equal_to_raster"] = _agreement(clips, groups.get((model, RASTER), {}))
        row["lossless"] = next(iter(clips.values())).get("lossless")
        rows.append(row)
    return rows


def per_horizon(clips: dict[str, Record], metric: str) -> NDArray[np.float64] | None:
    """Return the (N, T) values of a metric, one row a clip; None if it was not measured."""
    rows = [record["quality"][metric] for record in clips.values() if metric in record["quality"]]
    return np.array(rows, dtype=np.float64) if rows else None


def _quality(
    metric: str, clips: dict[str, Record], raster: dict[str, Record]
) -> dict[str, Any] | None:
    values = per_horizon(clips, metric)
    if values is None:
        return None
    means = dict(zip(clips, values.mean(axis=1), strict=True))
    summary = {
        "mean": float(values.mean()),
        "interval": bootstrap_interval(values.mean(axis=1)),
        "difference": None,
        "difference_interval": None,
    }
    both = {clip: record for clip, record in raster.items() if clip in means}
    reference = per_horizon(both, metric)
    if reference is not None:
        pairs = np.array([means[clip] for clip in both]) - reference.mean(axis=1)
        summary["difference"] = float(pairs.mean())
        summary["difference_interval"] = bootstrap_interval(pairs)
    return summary


def _distance(
    name: str, clips: dict[str, Record], truth: dict[str, Record]
) -> dict[str, Any] | None:
    """Compare with the true clips of the same names."""
    both = [clip for clip in clips if clip in truth and name in truth[clip]["features"]]
    if not both or name not in clips[both[0]]["features"]:
        return None
    features, reference = (
        np.concatenate([np.atleast_2d(unpack(lines[clip]["features"][name])) for clip in both])
        for lines in (clips, truth)
    )
    samples, dimension = features.shape
    value = frechet_distance(features, reference) if samples > 1 else None
    return {"value": value, "samples": samples, "dimension": dimension, "clips": len(both)}


def _speed(clips: dict[str, Record]) -> dict[str, float | None]:
    """Return medians over clips of speed, and how often a token was fed for each that came out."""
    decoded = [record for record in clips.values() if record["stats"]]
    names = ("num_steps", "frames_per_second", "tokens_per_second")
    values = {name: [record["stats"][name] for record in decoded] for name in names}
    values["fed_per_token"] = [
        record["stats"]["num_fed"] / math.prod(record["tokens"]["shape"])
        for record in decoded
        if "tokens" in record
    ]
    return {name: float(np.median(own)) if own else None for name, own in values.items()}


def _agreement(clips: dict[str, Record], raster: dict[str, Record]) -> float | None:
    """Return the share of tokens equal to raster's on the same clips with the same seeds."""
    pairs = [
        (unpack(record["tokens"]), unpack(raster[clip]["tokens"]))
        for clip, record in clips.items()
        if "tokens" in record and "tokens" in raster.get(clip, {})
    ]
    return float(np.mean([np.mean(ours == theirs) for ours, theirs in pairs])) if pairs else None
