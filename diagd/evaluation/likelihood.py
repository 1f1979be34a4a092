"""The teacher-forced gap on clips: what true frames cost under a schedule, minus under raster.

One line a clip, model and schedule in `teacher_forced.jsonl`; a killed run goes on where it was.
Nothing is generated: `diagd.decoding.likelihood` reads the clip once under the schedule's lanes.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from diagd.decoding.likelihood import schedule_nll
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.diagonal import Scheduled
from diagd.decoding.strategies.table import parse_strategy
from diagd.evaluation.measure import ClipMeter, Task
from diagd.evaluation.results import RASTER

FILE = "teacher_forced.jsonl"


def measure_likelihood(
    meter: ClipMeter, tasks: Sequence[Task], folder: Path
) -> list[dict[str, Any]]:
    """Return one line a task, measuring those that the file does not hold yet.

    Raises:
        ValueError: a clip longer than a model's context, or a file of other settings.
    """
    path = folder / FILE
    given = meter.settings.context_frames
    settings = {"context_frames": given, "num_frames": meter.settings.num_frames}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if any(line["settings"] != settings for line in lines):
        raise ValueError(f"{path} was measured with other settings: {lines[0]['settings']}")
    done = {(line["model"], line["method"], line["clip"]): line for line in lines}
    with path.open("a") as file:
        for task in track(
            [t for t in tasks if tuple(t) not in done], "teacher-forced", transient=True
        ):
            world, clip = meter.world(task.model), meter.clip(task.model, task.clip)
            tokens = world.tokenizer.encode(clip.frames.to(world.model.device))[None]
            actions = world.action_ids(clip.actions, len(clip.frames), "frame")
            contexts = 1 + (given - 1) // world.tokenizer.temporal_compression
            strategy = parse_strategy(task.method)
            assert isinstance(strategy, Scheduled)
            schedule = strategy.schedule(TokenGrid(tokens.shape[1] - contexts, *tokens.shape[2:]))
            row_start = strategy.row_start
            nll = schedule_nll(world.model, tokens, actions, schedule, row_start, contexts)
            line = {
                **task._asdict(),
                "settings": settings,
                "nll": nll.mean().item(),
                "nll_by_frame": nll.mean((0, 2, 3)).tolist(),
                "nll_by_row": nll.mean((0, 1, 3)).tolist(),
                "nll_by_column": nll.mean((0, 1, 2)).tolist(),
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            done[task] = line
    return [done[task] for task in tasks]


def summarize_likelihood(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean likelihood and gap of each model and schedule; the error is over clips."""
    by_key: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        by_key.setdefault((line["model"], line["method"]), {})[line["clip"]] = line["nll"]
    rows = []
    for (model, method), of_clips in by_key.items():
        raster = by_key[model, RASTER]
        gaps = [nll - raster[clip] for clip, nll in of_clips.items()]
        spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
        rows.append(
            {
                "model": model,
                "method": method,
                "clips": len(gaps),
                "nll": statistics.fmean(of_clips.values()),
                "gap": statistics.fmean(gaps),
                "gap_error": spread / len(gaps) ** 0.5,
            }
        )
    return rows


def print_likelihood(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    table = Table(title="teacher-forced, nats a token", box=SIMPLE)
    for header in ("model", "schedule", "clips", "likelihood", "gap to raster"):
        table.add_column(header, justify="left" if header in ("model", "schedule") else "right")
    for row in rows:
        gap = f"{row['gap']:+.4f} ± {row['gap_error']:.4f}"
        table.add_row(row["model"], row["method"], str(row["clips"]), f"{row['nll']:.4f}", gap)
    console.print(table)
