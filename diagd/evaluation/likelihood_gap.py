"""The teacher-forced gap on clips: what true frames cost under a strategy, minus under raster.

One line a clip, model and strategy in `teacher_forced.jsonl`, with run lines as in results.jsonl; a
killed run goes on where it was.
Nothing is generated: `diagd.decoding.likelihood` reads a clip once under the strategy's lanes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from diagd.console import print_table, track
from diagd.decoding.likelihood import gap_to_raster, spell_error, strategy_nll
from diagd.decoding.strategies.diagonal import Scheduled
from diagd.decoding.strategies.table import parse_strategy
from diagd.evaluation.measure import ClipMeter, Task
from diagd.evaluation.results import (
    RASTER,
    Record,
    ResultsWriter,
    check_same,
    key_of,
    read_results,
)

LIKELIHOOD_FILE = "teacher_forced.jsonl"


def measure_likelihood(
    meter: ClipMeter, tasks: Sequence[Task], folder: Path, run: Record
) -> list[Record]:
    """Return one line a task, measuring those that the file does not hold yet.

    Args:
        run: what the file says, before its lines, of how they came about.

    Raises:
        ValueError: a clip longer than a model's context, or a file of other settings.
    """
    path = folder / LIKELIHOOD_FILE
    with ResultsWriter(path) as writer:
        before = read_results(path)
        check_same(path, before, run)
        done = {key_of(line): line for line in before.clips}
        missing = [task for task in tasks if tuple(task) not in done]
        number = len(before.runs)
        if missing:
            writer.append({**run, "run": number})
        for task in track(missing, "teacher-forced"):
            line = {"kind": "clip", "run": number, **task._asdict(), **_likelihood(meter, task)}
            writer.append(line)
            done[task] = line
    return [done[task] for task in tasks]


def _likelihood(meter: ClipMeter, task: Task) -> dict[str, Any]:
    """Return the nats a token of a clip: all in all, by frame, by row and by column."""
    world, clip = meter.world(task.model), meter.clip(task.model, task.clip)
    tokens = world.tokenizer.encode(clip.frames.to(world.model.device))[None]
    actions = world.action_ids(clip.actions, len(clip.frames), "frame")
    given = 1 + (meter.settings.context_frames - 1) // world.tokenizer.temporal_compression
    strategy = parse_strategy(task.method)
    assert isinstance(strategy, Scheduled)
    nll = strategy_nll(world.model, tokens, actions, strategy, given)
    return {
        "nll": nll.mean().item(),
        "nll_by_frame": nll.mean((0, 2, 3)).tolist(),
        "nll_by_row": nll.mean((0, 1, 3)).tolist(),
        "nll_by_column": nll.mean((0, 1, 2)).tolist(),
    }


def summarize_likelihood(lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return likelihood and gap of each model and strategy (see `gap_to_raster`)."""
    by_key: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        by_key.setdefault((line["model"], line["method"]), {})[line["clip"]] = line["nll"]
    rows = []
    for (model, method), of_clips in by_key.items():
        raster = [by_key[model, RASTER][clip] for clip in of_clips]
        nll = torch.tensor(list(of_clips.values()), dtype=torch.float64)
        gap = gap_to_raster(nll, torch.tensor(raster, dtype=torch.float64))
        rows.append({"model": model, "method": method, "clips": len(nll), **gap})
    return rows


def print_likelihood(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    lines = [
        [
            row["model"],
            row["method"],
            str(row["clips"]),
            f"{row['nll']:.4f}",
            f"{row['gap']:+.4f} ± {spell_error(row['gap_error'])}",
        ]
        for row in rows
    ]
    header = "model", "strategy", "clips", "likelihood", "gap to raster"
    print_table(console, "teacher-forced, nats a token", header, lines, num_labels=2)
