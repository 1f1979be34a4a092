"""Compare strategies on recorded clips: quality, speed, steps, agreement with raster.

Each model continues each clip from its first frames under the recorded actions, with each strategy
and the same seed. Raster, the tokenizer's reconstruction and a copy of the last given frame are
always included. A killed run resumes; `diagd report` turns results.jsonl into a page.

With an image model, each strategy generates an image for each text or class with the same noise,
and raster's image is the reference. The price of a strategy is the likelihood of raster's tokens
under its schedule, with the same guidance.

    diagd evaluate --clips work/doom/heldout --num-clips 64 --out work/study
    diagd evaluate --model deepseek-ai/Janus-Pro-1B --prompts p.txt --out out
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.backends.names import Backend, DTypeName
from diagd.backends.prepare import choose_backend, choose_dtype
from diagd.console import make_console, track
from diagd.data.video import write_image, write_video
from diagd.evaluation.comparison import compare
from diagd.evaluation.meters import METERS, Meter, Task
from diagd.evaluation.options import IMAGES, EvaluateOptions
from diagd.evaluation.results import (
    Record,
    appending,
    check_same,
    file_name,
    key_of,
    read_results,
    video_path,
)
from diagd.families.checkpoints import contents_of, find_model
from diagd.families.clip_files import find_clips
from diagd.files import read_lines
from diagd.pipeline.world_folder import check_strategy
from diagd.system import clip_fingerprint, fingerprint, provenance
from diagd.workers import do_tasks


def choose_clips(
    clips: Path, num_clips: int | None, seed: int, limit: int | None = None
) -> list[str]:
    """Draw clips of a folder, or prompts of a file; with one seed, more include fewer.

    Without a number: all, up to the `limit`.
    """
    what = "clips"
    if clips.is_dir():
        names = list(find_clips(clips))
    else:
        what, lines = "prompts", read_lines(clips, "folder of clips, or file of prompts,")
        if not (names := [name for line in lines if (name := line.strip())]):
            raise ValueError(f"{clips}: expected one text or class per line, got none")
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ValueError(f"{clips}: {twice[0]!r} is there twice")
    if num_clips is None:
        num_clips = min(len(names), limit or len(names))
    if not 1 <= num_clips <= len(names):
        raise ValueError(f"expected a number of {what} from 1 to {len(names)}, got {num_clips}")
    places = list(range(len(names)))
    random.Random(seed).shuffle(places)
    return [names[place] for place in sorted(places[:num_clips])]


def main(options: EvaluateOptions) -> dict[str, Any]:
    """Measure what is missing, including clips that failed before, and print the tables."""
    device, models, mode = device_of(options.device), options.labelled_models(), options.mode
    fingerprints = {of: contents_of(name, options.adapter) for of, name in models.items()}
    limit = None if mode is IMAGES else options.lengths.num_clips
    clips = choose_clips(options.clips, options.num_clips, options.seed, limit)
    for name in models.values():
        found = find_model(name, adapter=options.adapter)
        options.drawing(found.defaults)
        for strategy in options.strategies():
            check_strategy(found, strategy)
    path = options.out / mode.file
    dtype, backends = _decide(options, device, path)
    make = partial(METERS[mode], options, dtype, backends)
    meter = make()
    failed: dict[str, str] = {}
    loads_here = options.is_this_process  # else others load the models
    if loads_here:
        for label in reversed(models):  # the first one stays loaded
            failed |= meter.check(label, clips)
    if len(failed) == len(clips):
        raise ValueError(failed[clips[0]])
    run = _run_line(options, clips) | {
        "settings": options.settings(dtype),
        "backends": backends,
        "metrics": meter.provenance,
        "models": fingerprints,
        **provenance(device),
    }
    tasks = [
        Task(model, strategy, clip)
        for model in models
        for clip in clips
        if clip not in failed
        for strategy in options.names()
    ]
    measured = _measure(options, path, tasks, run, (lambda: meter) if loads_here else make, failed)
    if not (results := read_results(path)).clips:
        raise ValueError(next(iter(failed.values())))
    table, notes = compare(results), list[str]()
    console = make_console()
    table.print(console)
    if limit is not None and len(clips) < limit:
        there = f"all {len(clips)} clips of {options.clips}"
        notes.append(f"{there}: the protocol {options.protocol} has {limit}")
        console.print(f"note: {notes[0]}")
    for clip, why in failed.items():
        console.print(f"{clip} could not be measured: {why}")
    return {
        "results": str(path),
        "measured": measured,
        "failed": failed,
        "notes": [*notes, *table.notes],
        "rows": table.rows,
    }


def _run_line(options: EvaluateOptions, clips: list[str]) -> Record:
    """Return what a run line says of the options and the clips."""
    files = {} if options.mode is IMAGES else find_clips(options.clips)
    return {
        "kind": "run",
        "mode": options.mode.name,
        "clips": {name: clip_fingerprint(files[name].path) for name in clips if name in files},
        "tokenizer": options.tokenizer and fingerprint(options.tokenizer),
        "options": json.loads(json.dumps(asdict(options), default=str)),
    }


def _measure(
    options: EvaluateOptions,
    path: Path,
    tasks: list[Task],
    run: Record,
    make: Callable[[], Meter],
    failed: dict[str, str],
) -> int:
    """Append a line for each task without one; collect failures; return how many were measured."""
    num_measured = 0
    with appending(path) as append:
        before = read_results(path)
        check_same(path, before, run)
        done = {key_of(record) for record in before.clips}
        if missing := [task for task in tasks if tuple(task) not in done]:
            run["run"] = len(before.runs)
            append(run)
            outcomes, num_done = do_tasks(missing, make, options), len(tasks) - len(missing)
            for task, outcome in track(outcomes, options.mode.unit, len(tasks), num_done):
                if isinstance(outcome, ValueError):
                    failed.setdefault(task.clip, str(outcome))
                else:
                    record, frames = outcome
                    video = None if frames is None else _keep(options, record, frames)
                    append({**record, "video": video, "run": run["run"]})
                    num_measured += 1
    return num_measured


def _decide(
    options: EvaluateOptions, device: torch.device, path: Path
) -> tuple[DTypeName, dict[str, Backend]]:
    """Return the dtype, and each model's backend: those of earlier runs of these results, if any.

    Timings choose, and may choose otherwise the next time.
    """
    runs = read_results(path).runs if path.is_file() else []
    runs = [run for run in runs if run["options"].get("dtype") == options.dtype]
    dtype: DTypeName = (
        runs[-1]["settings"]["dtype"] if runs else choose_dtype(options.dtype, device)
    )
    adapter = options.adapter
    known = {label: one for run in runs for label, one in run.get("backends", {}).items()}
    return dtype, {
        label: known.get(label)
        or choose_backend(options.backend, device, dtype, find_model(model, adapter=adapter).config)
        for label, model in options.labelled_models().items()
    }


def _keep(options: EvaluateOptions, record: Record, frames: Tensor) -> str:
    """Write the video or the image of a line, and return its path in the folder."""
    if options.mode is IMAGES:
        model, strategy, prompt = map(file_name, key_of(record))
        path = f"images/{model}/{strategy}/{prompt[:80]}-{record['seed']}.png"
        write_image(options.out / path, frames[0])
    else:
        path = video_path(*key_of(record))
        write_video(options.out / path, frames, record["fps"])
    return path
