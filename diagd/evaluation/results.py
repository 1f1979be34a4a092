"""results.jsonl: one line for each run and each clip, appended whole, read back without torch.

A run line says how the lines after it came about: options, commit, device, versions, model files.

    {"kind": "run", "run": 0, "settings": {...}, "models": {...}, "commit": ..., "device": ...}
    {"kind": "clip", "run": 0, "model": "doom", "strategy": "k=1", "clip": "clip_7", "seed": ...,
     "quality": {"psnr": [one a frame]}, "features": {"tfd": {...}}, "stats": {...},
     "tokens": {...}, "lossless": "no", "video": ...}

Lines of a strategy (`raster`, `k=1`, `exact`: see `diagd.decoding.strategies.table`) hold its
tokens as well. In its place may stand a baseline: `truth` (features only), `reconstruction` (by the
tokenizer), `copy` (of the last context frame).
"""

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diagd.files import append_line, read_json_lines, require_file
from diagd.metrics.frechet import frechet_distance
from diagd.system import only_writer, refuse_other_run

RESULTS_FILE = "results.jsonl"
LIKELIHOOD_FILE = "teacher_forced.jsonl"
IMAGES_FILE = "images.jsonl"
BASELINES = ("truth", "reconstruction", "copy")
RASTER = "raster"

Record = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The run lines and the clip lines of results.jsonl, in order."""

    runs: list[Record]
    clips: list[Record]

    def done(self) -> set[tuple[str, str, str]]:
        return {key_of(record) for record in self.clips}


def key_of(record: Record) -> tuple[str, str, str]:
    """Return the unique key of a clip line: (model, strategy, clip)."""
    return record["model"], record["strategy"], record["clip"]


def file_name(text: str) -> str:
    """Make any label, strategy or clip a file name."""
    return re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".") or "_"


def video_path(model: str, strategy: str, clip: str) -> str:
    """Return where a video lies, relative to the folder of results."""
    return "/".join(("videos", file_name(model), file_name(strategy), f"{file_name(clip)}.mp4"))


def read_results(path: Path) -> Results:
    """Read a file; a last line that a killed run left unfinished is passed over."""
    require_file(path, "results")
    results = Results([], [])
    seen: set[tuple[str, str, str]] = set()
    for number, record in enumerate(read_json_lines(path), start=1):
        try:
            if record["kind"] == "run":
                results.runs.append(record)
                continue
            key = key_of(record)
        except KeyError:
            raise ValueError(f"{path}:{number}: expected a line of diagd evaluate") from None
        if key in seen:
            raise ValueError(f"{path}:{number}: {' '.join(key)} is there twice")
        seen.add(key)
        results.clips.append(record)
    return results


def check_same(path: Path, before: Results, run: Record) -> None:
    """Raise ValueError if earlier lines were measured otherwise than this run would measure."""
    measured = {record["clip"] for record in before.clips}
    for earlier in before.runs:
        models = earlier["models"].keys() & run["models"].keys()
        clips = measured & earlier["clips"].keys() & run["clips"].keys()
        then, now = (
            {f"model {label}": one["models"][label] for label in sorted(models)}
            | {f"clip {name}": one["clips"][name] for name in sorted(clips)}
            | {key: one[key] for key in ("tokenizer", "metrics")}
            | one["settings"]
            for one in (earlier, run)
        )
        refuse_other_run(f"{path} was measured with", then, now)


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Record], None]]:
    """Yield a function that appends a line to a file of results, whole or not at all.

    There is one writer at a time. Opening cuts off a line that a killed run left unfinished.
    """
    with only_writer(path.parent, path.name):
        with path.open("ab") as file:
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        yield lambda record: append_line(path, json.dumps(record, allow_nan=False))


def pack(values: NDArray[Any]) -> Record:
    """Turn an array into JSON: its shape, and little-endian numbers in base64.

    Floats become float32; integers int16 where all fit, else int32.
    """
    kind = "float32" if values.dtype.kind == "f" else "int16"
    if kind == "int16" and values.size and np.abs(values).max() >= 2**15:
        kind = "int32"
    data = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return {"shape": list(data.shape), kind: base64.b64encode(data.tobytes()).decode()}


def unpack(packed: Record) -> NDArray[Any]:
    (kind,) = packed.keys() - {"shape"}
    data = np.frombuffer(base64.b64decode(packed[kind]), np.dtype(kind).newbyteorder("<"))
    return data.reshape(packed["shape"]).astype(kind)


QUALITY = ("psnr", "ssim", "lpips")
DISTANCES = ("fvd", "tfd")
RESAMPLES = 10_000
LEVEL = 0.95

Groups = dict[tuple[str, str], dict[str, Record]]  # (model, strategy) -> clip -> its line


def grouped(results: Results) -> Groups:
    """Sort lines by model and strategy: raster, others by falling number of steps, baselines."""
    models = list(dict.fromkeys(label for run in results.runs for label in run["models"]))
    groups: Groups = {}
    for record in sorted(results.clips, key=lambda record: record["clip"]):
        groups.setdefault((record["model"], record["strategy"]), {})[record["clip"]] = record

    def rank(key: tuple[str, str]) -> tuple[Any, ...]:
        model, strategy = key
        steps = _speed(groups[key])["num_steps"] or 0.0
        return models.index(model), strategy in BASELINES, strategy != RASTER, -steps, strategy

    return {key: groups[key] for key in sorted(groups, key=rank)}


def bootstrap_interval(values: NDArray[np.float64]) -> list[float] | None:
    """Return the 95% interval of the mean of (N,) values; None of fewer than two."""
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    return np.quantile(values[draws].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def mean_and_interval(name: str, values: ArrayLike) -> dict[str, Any]:
    """Return the mean of (N,) values by its name, None of none, and its interval."""
    own = np.asarray(values)
    mean = float(own.mean()) if len(own) else None
    return {name: mean, f"{name}_interval": bootstrap_interval(own)}


def bias_notes(name: str, distances: Iterable[dict[str, Any] | None]) -> list[str]:
    """Warn of a Frechet distance that rests on too few samples, as `distance_of` tells."""
    sizes = [(one["samples"], one["dimension"]) for one in distances if one]
    few = [(samples, dimension) for samples, dimension in sizes if samples <= dimension]
    return [
        f"Warning: {name.upper()} of {samples} samples in {dimension} dimensions is too high: its "
        f"covariance needs at least {dimension + 1}. More clips help (--num-clips); compare only "
        "rows of equally many."
        for samples, dimension in sorted(few)[:1]
    ]


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model and strategy, and for each baseline but the truth.

    A row holds `clips`; for each metric `{"mean", "interval", "difference", "difference_interval"}`
    (the last two against raster of the same model on the clips both have); for each distance
    `{"value", "samples", "dimension", "clips"}`. For a strategy there are medians of speed,
    `fed_per_token`, `speedup` and `step_ratio` (over raster), `equal_to_raster` (share of tokens,
    over all clips that raster was run on) and `lossless` (see `Strategy.promise`).
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        if strategy == "truth":
            continue
        raster, truth = (groups.get((model, name), {}) for name in (RASTER, "truth"))
        others = {} if strategy == RASTER else raster
        row: dict[str, Any] = {"model": model, "strategy": strategy, "clips": len(clips)}
        row |= {metric: quality_of(metric, clips, others) for metric in QUALITY}
        row |= {name: distance_of(name, clips, truth) for name in DISTANCES}
        speed, reference = _speed(clips), _speed(others)
        row |= speed
        row["speedup"] = _ratio(speed["frames_per_second"], reference["frames_per_second"])
        row["step_ratio"] = _ratio(reference["num_steps"], speed["num_steps"])
        row["equal_to_raster"] = _agreement(clips, raster)
        row["lossless"] = next(iter(clips.values())).get("lossless")
        rows.append(row)
    return rows


def per_horizon(clips: dict[str, Record], metric: str) -> NDArray[np.float64] | None:
    """Return the (N, T) values of a metric, one row a clip; None if it was not measured."""
    rows = [record["quality"][metric] for record in clips.values() if metric in record["quality"]]
    return np.array(rows, dtype=np.float64) if rows else None


def quality_of(
    metric: str, clips: dict[str, Record], raster: dict[str, Record]
) -> dict[str, Any] | None:
    """Return a metric of a strategy as in a row of `summarize`; None if it was not measured."""
    values = per_horizon(clips, metric)
    if values is None:
        return None
    means = dict(zip(clips, values.mean(axis=1), strict=True))
    both = {clip: record for clip, record in raster.items() if clip in means}
    reference = per_horizon(both, metric)
    pairs = [] if reference is None else [means[clip] for clip in both] - reference.mean(axis=1)
    interval = bootstrap_interval(values.mean(axis=1))
    difference = mean_and_interval("difference", pairs)
    return {"mean": float(values.mean()), "interval": interval, **difference}


def distance_of(
    name: str, clips: dict[str, Record], truth: dict[str, Record]
) -> dict[str, Any] | None:
    """Return a distance from what is true, of the same names, as in a row of `summarize`."""
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
        record["stats"]["num_fed"] / math.prod(record["tokens"]["shape"]) for record in decoded
    ]
    return {name: float(np.median(own)) if own else None for name, own in values.items()}


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def _agreement(clips: dict[str, Record], raster: dict[str, Record]) -> float | None:
    """Return the share of tokens equal to raster's on the same clips with the same seeds."""
    shares = [
        np.mean(unpack(record["tokens"]) == unpack(raster[clip]["tokens"]))
        for clip, record in clips.items()
        if "tokens" in record and clip in raster
    ]
    return float(np.mean(shares)) if shares else None
