"""Compare exact decoding with raster, diagonals and its rivals on held-out episodes.

Writes exact.json (passes, tokens fed, ms, frames/s, tokens equal to raster, PSNR against what was
recorded), exact_speed.png and exact_runs.png (how far fronts come, by row and by entropy). Leave
the machine alone. Needs matplotlib and torchmetrics (`pip install 'diagd[train,metrics]'`).

    python runs/exact.py --clips work/doom/heldout --out docs/results
"""

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from rich.progress import track
from torch import Tensor

from diagd.data.actions import read_actions
from diagd.data.video import read_video, resize
from diagd.decoding.costs import measure_costs
from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.exact import ExactEngine, ExactOptions, Pass
from diagd.decoding.plan import RowStart
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.visibility import NEVER
from diagd.decoding.zipar import AdaptiveZipAREngine
from diagd.flags import DTypeName, dtype_of
from diagd.metrics.quality import psnr
from diagd.pipeline import VideoGenerator
from diagd.pretrained import Habits
from diagd.provenance import cpu_name

WIDE = 96  # lanes of the rivals that have no drafts: as many as still save passes


@dataclass(frozen=True)
class Options:
    """Run every way of decoding on the same clips with the same seeds."""

    clips: Path  # folder of clip_*.mp4 and clip_*.jsonl
    out: Path  # folder for exact.json and pictures
    model: str = "doom"
    num_clips: int = 64
    frames: int = 16
    context_frames: int = 4
    start: int = 0  # frame of the clip where its context begins
    temperature: float = Habits.temperature  # 0 is greedy
    dtype: DTypeName = "float32"
    device: str = "cpu"
    only: tuple[str, ...] = ()  # names of ways to run besides raster; all by default
    seed: int = 0


@dataclass(frozen=True)
class Way:
    """One way to decode: a schedule or exact options; interactive ones get a frame at a time."""

    row_lag: int = 0  # 0 is raster
    exact: ExactOptions | None = None
    row_start: RowStart = "temporal"
    interactive: bool = False
    window: int | None = None  # of adaptive ZipAR


@dataclass
class Result:
    """What a way took and wrote on all clips."""

    passes: int = 0
    fed: int = 0
    seconds: float = 0.0
    frames: int = 0
    equal: list[float] = field(default_factory=list)
    decibels: list[float] = field(default_factory=list)
    clips_equal: int = 0


def ways(greedy: bool) -> dict[str, Way]:
    """Name every way."""
    found = {
        "raster": Way(),
        **{f"k={k}": Way(k) for k in (1, 2, 4)},
        "exact": Way(exact=ExactOptions()),
        "exact, interactive": Way(exact=ExactOptions(), interactive=True),
        **{f"exact, {n} lanes": Way(exact=ExactOptions(n)) for n in (16, 32, 64, 96)},
        **{f"jacobi, {n} lanes": Way(exact=ExactOptions(n, draft_lag=0)) for n in (32, WIDE)},
        **{f"tolerance {f}": Way(exact=ExactOptions(tolerance=f)) for f in (1.5, 3.0, 10.0)},
        **{f"zipar {w}": Way(w, row_start="spatial") for w in (2, 4, 8)},
        **{f"zipar, adaptive {w}": Way(window=w) for w in (2, 4)},
    }
    if not greedy:
        for rule in ("sjd", "mc-sjd"):
            found[rule] = Way(exact=ExactOptions(WIDE, draft_lag=0, rule=rule))
    return found


def main(options: Options) -> None:
    """Run all ways on all clips and write the report."""
    dtype = dtype_of(options.dtype)
    world = VideoGenerator.from_pretrained(
        options.model, options.device, dtype, int8=options.dtype == "int8"
    )
    assert world.vocabulary is not None
    greedy = options.temperature == 0
    sampling = SamplingOptions(options.temperature, top_p=None if greedy else 0.9)
    todo = ways(greedy)
    if unknown := set(options.only) - set(todo):
        raise ValueError(f"only must name some of {', '.join(todo)}, got {', '.join(unknown)}")
    todo = {k: w for k, w in todo.items() if not options.only or k in ("raster", *options.only)}
    results = {name: Result() for name in todo}
    passes: dict[str, list[Pass]] = {name: [] for name in todo}
    gains: list[tuple[float, int]] = []  # entropy of the token waited for, tokens gained
    costs: dict[int, float] = {}
    paths = sorted(options.clips.glob("clip_*.mp4"))[: options.num_clips]
    for index, path in enumerate(track(paths)):
        length = options.start + options.context_frames + options.frames
        video = resize(read_video(path, length).frames[options.start :], *world.frame_size_px)
        context, truth = video.split([options.context_frames, options.frames])
        actions = read_actions(path.with_suffix(".jsonl"), world.vocabulary)[options.start : length]
        raster = None
        for name, way in todo.items():
            engine = world.start(
                context,
                context_actions=actions[1 : options.context_frames],
                row_start=way.row_start,
                sampling=sampling,
                seed=options.seed + 1000 * index,
                exact=way.exact or False,
            )
            if way.window:
                engine = adaptive(world, engine, way.window, options.context_frames)
            if isinstance(engine, ExactEngine) and not costs:
                costs = measure_costs(engine)
            tokens, seconds = decode(world, engine, way, actions[options.context_frames :])
            raster = tokens if raster is None else raster
            result, same = results[name], tokens == raster
            result.passes += engine.num_steps
            result.fed += engine.num_fed
            result.seconds += seconds
            result.frames += len(tokens)
            result.equal.append(same.float().mean().item())
            result.clips_equal += bool(same.all())
            result.decibels += psnr(world.tokenizer.decode(tokens).cpu(), truth).tolist()
            if isinstance(engine, ExactEngine):
                passes[name] += engine.passes
                if name == "exact":
                    entropy = entropies(engine, world, sampling, options.context_frames)
                    gains += [
                        (entropy[p.frame, p.row, p.column].item(), p.num_accepted)
                        for p in engine.passes
                        if p.frame < len(entropy)
                    ]
    report = {
        "options": {k: str(v) for k, v in asdict(options).items()},
        "clips": len(paths),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": cpu_name() if options.device == "cpu" else torch.cuda.get_device_name(),
        "milliseconds_by_lanes": {n: 1000 * seconds for n, seconds in costs.items()},
        "ways": {name: summary(results[name], results["raster"], world) for name in results},
        "runs": {name: histograms(passes[name]) for name in results if passes[name]},
        "gain_by_entropy": by_entropy(gains),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = ("_greedy" if greedy else "") + ("" if dtype == torch.float32 else f"_{options.dtype}")
    partial = options.out / f"exact{suffix}.json.partial"
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.rename(partial.with_suffix(""))
    draw_speed(report["ways"], options.out / f"exact{suffix}_speed.png")
    if "exact" in report["runs"]:
        draw_runs(report, options.out / f"exact{suffix}_runs.png")
    for name, row in report["ways"].items():
        print(f"{name:20s}", *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")


def adaptive(
    world: VideoGenerator, like: DiagonalEngine, window: int, context_frames: int
) -> AdaptiveZipAREngine:
    """Return an engine that goes on from the same prompt with adaptive ZipAR."""
    engine = AdaptiveZipAREngine(
        world.model,
        world.height,
        world.width,
        num_action_tokens=like.frame.num_action_tokens,
        sampling=like.sampling,
        seed=like.seeds.tolist(),
        window=window,
    )
    engine.prefill(like.tokens[:, : like.num_used], context_frames)
    return engine


def decode(
    world: VideoGenerator, engine: Any, way: Way, actions: list[str]
) -> tuple[Tensor, float]:
    """Return (T, height, width) tokens and the seconds they took."""
    started = time.perf_counter()
    stretch = 1 if way.interactive else len(actions)
    frames: list[Tensor] = []
    for first in range(0, len(actions), stretch):
        schedule = world.schedule(stretch, way.row_lag or 1, raster=not way.row_lag)
        ids = world.action_ids(actions[first : first + stretch], stretch, "frame")
        frames += [frame[0].cpu() for frame in engine.decode(schedule, ids)]
    return torch.stack(frames), time.perf_counter() - started


@torch.inference_mode()
def entropies(
    engine: ExactEngine, world: VideoGenerator, sampling: SamplingOptions, context_frames: int
) -> Tensor:
    """Return the nats of uncertainty at each token still held since the prompt: (T, H, W).

    Empty once frames were dropped, for then the model saw another context.
    """
    held = engine.num_held - context_frames
    if engine.num_dropped_frames:
        return torch.empty(0, world.height, world.width)
    length, tokens = engine.num_used, engine.tokens[:1, : engine.num_used]
    cache = world.model.make_cache(1, length)
    slots = torch.arange(length, device=tokens.device)
    visible = slots[:, None] >= slots
    assert engine.fed_at[0] != NEVER
    logits = world.model.forward(tokens, slots, slots, visible, cache).float()[0, :-1]
    logits = logits[:, : world.tokenizer.codebook_size] / (sampling.temperature or 1.0)
    logs = logits.log_softmax(-1)
    nats = -(logs.exp() * logs).sum(-1)[-held * engine.frame.slots_per_frame :]
    visual = nats.view(held, -1)[:, engine.frame.num_action_tokens :]
    return visual.reshape(held, world.height, world.width).cpu()


def summary(result: Result, raster: Result, world: VideoGenerator) -> dict[str, float]:
    """Put a way into numbers."""
    tokens = result.frames * world.height * world.width
    return {
        "passes_a_frame": result.passes / result.frames,
        "fewer_passes": raster.passes / result.passes,
        "fed_per_token": result.fed / tokens,
        "ms_a_pass": 1000 * result.seconds / result.passes,
        "frames_per_second": result.frames / result.seconds,
        "over_raster": raster.seconds / result.seconds,
        "tokens_equal_to_raster": sum(result.equal) / len(result.equal),
        "clips_equal_to_raster": result.clips_equal / len(result.equal),
        "psnr": sum(result.decibels) / len(result.decibels),
    }


def histograms(passes: list[Pass]) -> dict[str, Any]:
    """Count accepted runs, and average them by the row waited for."""
    by_row: dict[int, list[int]] = {}
    for one in passes:
        by_row.setdefault(one.row, []).append(one.num_accepted)
    return {
        "runs": dict(sorted(Counter(one.num_accepted for one in passes).items())),
        "mean_by_row": {row: sum(runs) / len(runs) for row, runs in sorted(by_row.items())},
        "passes_by_row": {row: len(runs) for row, runs in sorted(by_row.items())},
    }


def by_entropy(gains: list[tuple[float, int]]) -> dict[str, float]:
    """Average the tokens gained by the entropy of the token waited for, in half nats."""
    bins: dict[float, list[int]] = {}
    for nats, gain in gains:
        bins.setdefault(int(nats * 2) / 2, []).append(gain)
    return {str(nats): sum(runs) / len(runs) for nats, runs in sorted(bins.items())}


def draw_speed(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Draw quality against speed."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, row in rows.items():
        lossless = row["tokens_equal_to_raster"] > 0.999 or "sjd" in name
        place = row["frames_per_second"], row["psnr"]
        axis.plot(*place, "o" if lossless else "x", color="C0" if lossless else "C1")
        axis.annotate(name, place, fontsize=8, xytext=(4, 3), textcoords="offset points")
    axis.set(xlabel="frames/s", ylabel="PSNR to the recording, dB", title="dots are lossless")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_runs(report: dict[str, Any], path: Path) -> None:
    """Draw how many tokens a pass gains, overall, by row and by entropy."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    runs, rows = report["runs"]["exact"]["runs"], report["runs"]["exact"]["mean_by_row"]
    entropy = report["gain_by_entropy"]
    labels = ("tokens gained in a pass", "row waited for", "nats of the token waited for")
    values = runs, rows, {float(nats): gain for nats, gain in entropy.items()}
    for axis, label, bars, what in zip(
        axes, labels, values, ("passes", "tokens gained", "tokens gained"), strict=True
    ):
        axis.bar(list(bars), list(bars.values()), width=0.4 if bars is values[2] else 0.8)
        axis.set(xlabel=label, ylabel=what)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Options))
