"""Choose a strategy by its cost: speed against the likelihood of true videos.

Every candidate is measured by its teacher-forced gap (`diagd.decoding.teacher_forcing`): how much
likelier, in nats per token, held-out clips are in raster order. A few frames are generated to
measure speed here; the choice is by steps, which do not depend on the machine.

diagd tune --tokens tokens/heldout --tolerance 0.05
diagd tune --tokens tokens/heldout --strategy k=1 k=2/predecessor zipar=4
diagd tune --tokens tokens --model world --make-default
diagd tune --tokens tokens/heldout --by row column --out tune    # plots
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.backends.prepare import prepare
from diagd.console import make_console, print_records, print_table, track
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.strategies.table import Diagonal, Raster, Strategy
from diagd.decoding.teacher_forcing import gap_to_raster, strategy_nll
from diagd.families.checkpoints import available_models, find_model, load_model, write_defaults
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.pipeline.prompts import prompt_tokens
from diagd.system import provenance
from diagd.tokenizers.shards import TokenClips, part_of, read_shards
from diagd.training.charts import chart
from diagd.training.options import Axis, TuneOptions
from diagd.training.sequences import windows
from diagd.training.setup import check_fit

DEFAULT_CLIPS = 16
TIMED_FRAMES = 2
GAP_LABEL = "nats per token above raster"
Clip = tuple[Tensor, Tensor]  # tokens (1, T, height, width) and actions (1, T, 1)


def main(options: TuneOptions) -> dict[str, Any]:
    """Measure; print and write the results."""
    document = tune(options)
    if options.make_default and document["choice"] is not None:
        found = find_model(options.model)
        defaults = replace(found.defaults, decoding=document["choice"]["name"])
        write_defaults(found.path.parent, defaults)
    print_tuning(document, options)
    if options.out is not None:
        write_json(options.out / "tune.json", document, indent=1)
        plot_frontier(options.out / "tune.png", document["rows"], options.tolerance)
        for axis in options.by:
            plot_profiles(options.out / f"tune_{axis}.png", axis, document["rows"])
    return document


def tune(options: TuneOptions) -> dict[str, Any]:
    """Measure the candidates, raster first; choose the fastest within the tolerance, if any."""
    device = device_of(options.device)
    clips = read_shards(part_of(options.tokens, "heldout"))
    model = _load(options.model, clips, device)
    baseline = _load(options.baseline, clips, device) if options.baseline else None
    held, context_frames = model.config.frames_held, options.context_frames
    frames = min(held, clips.tokens.shape[1]) if options.frames is None else options.frames
    if not context_frames < frames <= held:
        raise ValueError(
            f"frames must be in [context_frames + 1={context_frames + 1}, {held}], "
            f"the model's context, got {frames}"
        )
    grid = TokenGrid(frames - context_frames, *clips.tokens.shape[2:])
    candidates = list_candidates(options, grid)
    num_clips = options.clips or min(DEFAULT_CLIPS, len(clips.tokens))
    tokens, actions = windows(clips, num_clips, frames, options.seed)
    single = list(zip(tokens.split(1), actions.split(1), strict=True))
    costs = _measure(model, candidates, single, context_frames)
    raster = costs[0]
    if baseline is not None:
        (raster,) = _measure(baseline, candidates[:1], single, context_frames)
    speeds = _speeds(model, candidates, grid, single[0], context_frames)
    rows = [_row(*one, grid, raster) for one in zip(candidates, costs, speeds, strict=True)]
    for row in rows:
        row["frontier"] = not any(_beats(other, row) for other in rows)
    affordable = [row for row in rows if row["gap"] <= options.tolerance]
    choice = min(affordable, key=lambda row: (row["num_steps"], row["gap"]), default=None)
    return {
        "options": json.loads(json.dumps(asdict(options) | {"clips": num_clips}, default=str)),
        "grid": [grid.num_frames, grid.height, grid.width],
        **provenance(device),
        "rows": rows,
        "choice": choice and {name: choice[name] for name in ("name", "row_start", "num_steps")},
    }


def list_candidates(options: TuneOptions, grid: TokenGrid) -> list[Strategy]:
    """List raster, then the strategies given, or else diagonals with each row start."""
    found: list[Strategy] = [Raster()]
    if options.strategy:
        for strategy in options.named:
            strategy.schedule(grid)
        return list(dict.fromkeys([*found, *options.named]))
    for row_lag in options.row_lag or [lag for lag in (1, 2, 4, 8) if lag < grid.width]:
        spatial = DiagonalSchedule.spatial(grid, row_lag)
        frame_lags: list[int | None] = [None] if row_lag < grid.width else []  # else raster
        if options.overlap:
            whole = row_lag * grid.height
            shorter = dict.fromkeys((whole, whole // 2, whole // 4))
            frame_lags += [lag for lag in shorter if 1 <= lag < spatial.frame_lag]
        found += [
            Diagonal(row_lag, frame_lag, row_start)
            for frame_lag in frame_lags
            for row_start in options.row_start
        ]
    return found


def _load(name: str, clips: TokenClips, device: torch.device) -> Transformer:
    model = load_model(name, device=device)
    check_fit(name, model.config, clips)
    return model


def _measure(
    model: Transformer, candidates: list[Strategy], clips: list[Clip], context_frames: int
) -> Tensor:
    """Return (candidates, clips, T, height, width) float64 nats, clip by clip."""
    costs = [
        strategy_nll(model, *clip, strategy, context_frames)
        for strategy, clip in track(list(product(candidates, clips)), "judging")
    ]
    return torch.cat(costs).unflatten(0, (len(candidates), len(clips))).double().cpu()


def _speeds(
    model: Transformer, candidates: list[Strategy], grid: TokenGrid, clip: Clip, context_frames: int
) -> list[float]:
    """Return each candidate's frames per second, the faster of two runs; consumes the model."""
    (prepared, _), (tokens, actions) = prepare(model), clip
    given = tokens[0, :context_frames], actions[:, :context_frames]
    prompt = prompt_tokens((), *given, model.config.frame)
    timed = replace(grid, num_frames=min(TIMED_FRAMES, grid.num_frames))
    coming = actions[:, context_frames:][:, : timed.num_frames]
    speeds = list[float]()
    for strategy in track(candidates, "timing"):
        runs = [
            generate_tokens(prepared, prompt, strategy, coming, context_frames, timed).stats
            for _ in range(2)
        ]
        step_s = min(stats.seconds / stats.num_steps for stats in runs)
        speeds.append(grid.num_frames / (strategy.schedule(grid).num_steps * step_s))
    return speeds


def _row(
    strategy: Strategy, cost: Tensor, speed: float, grid: TokenGrid, raster: Tensor
) -> dict[str, Any]:
    """Report a candidate from its frames per second, its cost and raster's, (clips, T, H, W)."""
    gap, schedule = cost - raster, strategy.schedule(grid)
    return {
        "name": strategy.name,
        "row_lag": schedule.row_lag,
        "frame_lag": schedule.frame_lag,
        "row_start": "" if strategy == Raster() else schedule.row_start,
        "num_steps": schedule.num_steps,
        "speedup": schedule.speedup,
        "frames_per_second": speed,
        **gap_to_raster(cost, raster),
        "gap_by_frame": gap.mean((0, 2, 3)).tolist(),
        "gap_by_row": gap.mean((0, 1, 3)).tolist(),
        "gap_by_column": gap.mean((0, 1, 2)).tolist(),
    }


def _beats(row: dict[str, Any], other: dict[str, Any]) -> bool:
    gap, num_steps = row["gap"], row["num_steps"]
    return num_steps <= other["num_steps"] and (gap, num_steps) < (other["gap"], other["num_steps"])


COLUMNS = {
    "strategy": "{name}",
    "steps": "{num_steps}",
    "step ratio": "{speedup:.1f}x",
    "frames/s": "{frames_per_second:.2f}",
    "nats": "{nll:.4f}",
    "gap": "{gap:+.4f}",
    "error": "{gap_error:.4f}",
    "best": "{best}",
}


def print_tuning(document: dict[str, Any], options: TuneOptions) -> None:
    """Print the candidates, their gaps by the axes given, and the choice."""
    console, rows, choice = make_console(), document["rows"], document["choice"]
    clips, threads = document["options"]["clips"], document["threads"]
    title = f"{options.model}: speed here ({threads} threads) against likelihood ({clips} clips)"
    best = choice and choice["name"]
    marked = [row | {"best": "*" if row["name"] == best else ""} for row in rows]
    print_records(console, title, COLUMNS, marked)
    for axis in options.by:
        profiles = _profiles(rows, axis)
        lines = [[name, *(f"{v:+.3f}" for v in values)] for name, values in profiles.items()]
        header = ["strategy", *map(str, range(len(lines[0]) - 1))]
        print_table(console, f"nats above raster by {axis}", header, lines)
    console.print(
        "gap: loss of a strategy on true videos, in nats per token over raster order; "
        "best: the fewest steps within the tolerance"
    )
    console.print(
        f"within {options.tolerance} nats of raster: {choice['name'] if choice else 'no strategy'}"
    )
    console.print(advise(choice, options))


def advise(choice: dict[str, Any] | None, options: TuneOptions) -> str:
    """Format the command that uses the choice, and the one that stores it."""
    model = quote(options.model)
    if choice is None:
        return f"next: use a larger --tolerance, or diagd finetune --init {model}"
    use = f"next: diagd play --model {model} --strategy {quote(choice['name'])}"
    if options.model in available_models():
        return use
    if options.make_default:
        return f"next: diagd play --model {model}, which now decodes so by default"
    return f"{use}; diagd tune with --make-default stores it as the default of {options.model}"


def _profiles(rows: list[dict[str, Any]], axis: Axis) -> dict[str, list[float]]:
    """Choose, for each pair of lags, the row start with the lowest cost."""
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        lags = row["row_lag"], row["frame_lag"]
        if lags not in best or row["gap"] < best[lags]["gap"]:
            best[lags] = row
    return {row["name"]: row[f"gap_by_{axis}"] for row in best.values()}


def plot_frontier(path: Path, rows: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Plot the gap of strategies against their speed."""
    with chart(path, 4.5, "row start", xlabel="frames per second here", ylabel=GAP_LABEL) as axis:
        for row_start in dict.fromkeys(row["row_start"] for row in rows):
            own = [row for row in rows if row["row_start"] == row_start]
            axis.errorbar(
                [row["frames_per_second"] for row in own],
                [row["gap"] for row in own],
                yerr=[row["gap_error"] or 0.0 for row in own],
                fmt="o",
                markersize=4,
                capsize=2,
                label=row_start or "raster",
            )
        frontier = sorted(
            (row["frames_per_second"], row["gap"], row["name"]) for row in rows if row["frontier"]
        )
        axis.plot(*zip(*[point[:2] for point in frontier], strict=True), color="gray", linewidth=1)
        for speed, gap, name in frontier:
            axis.annotate(name, (speed, gap), textcoords="offset points", xytext=(4, 5), fontsize=8)
        axis.axhline(tolerance, color="black", linewidth=0.8, linestyle="--")


def plot_profiles(path: Path, over: Axis, rows: list[dict[str, Any]]) -> None:
    with chart(path, xlabel=over, ylabel=GAP_LABEL) as axis:
        for name, values in _profiles(rows, over).items():
            axis.plot(range(len(values)), values, marker=".", linewidth=1, label=name)
