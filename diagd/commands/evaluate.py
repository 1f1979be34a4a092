"""Compare strategies on recorded clips: quality, speed, steps, agreement with raster.

Every clip is continued from its first frames under its recorded actions, by each model with each
strategy and the same seed. Raster, the tokenizer's reconstruction and a copy of the last given
frame are always in. A killed run goes on where it was; `diagd report` turns results.jsonl into a
page.

    diagd evaluate --clips work/doom/heldout --num-clips 64 --out work/study
"""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from diagd.backends.devices import device_of
from diagd.backends.prepare import choose_dtype
from diagd.console import make_console, progress
from diagd.data.video import write_video
from diagd.evaluation.comparison import compare
from diagd.evaluation.measure import (
    ClipMeter,
    Outcome,
    Task,
    choose_clips,
    clip_after,
    compare_likelihood,
)
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import (
    LIKELIHOOD_FILE,
    RESULTS_FILE,
    Record,
    appending,
    check_same,
    key_of,
    read_results,
    video_path,
)
from diagd.families.checkpoints import model_path
from diagd.families.clip_files import find_clips
from diagd.system import clip_fingerprint, fingerprint, provenance
from diagd.workers import do_tasks


def main(options: EvaluateOptions) -> dict[str, Any]:
    """Measure what is not there yet, print the tables, and name the clips that `failed`.

    A clip that cannot be measured stops no other, and the next run tries it again.
    """
    device, pool, models = device_of(options.device), options.pool(), options.labelled_models()
    dtype = choose_dtype(options.dtype, device)
    fingerprints = {label: fingerprint(model_path(name)) for label, name in models.items()}
    clips = choose_clips(options.clips, options.lengths.num_clips, options.seed)
    if options.revisit:
        clip_after(options.clips, clips[0])
    meter = ClipMeter(options, dtype)
    failed: dict[str, str] = {}
    if pool.is_this_process:  # else others load the models
        for label in reversed(models):  # the first one stays loaded
            failed |= meter.check(label, clips)
    if len(failed) == len(clips):
        raise ValueError(failed[clips[0]])
    files = find_clips(options.clips)
    run = {
        "kind": "run",
        "settings": options.settings(dtype),
        "metrics": meter.provenance,
        "models": fingerprints,
        "clips": {name: clip_fingerprint(files[name].path) for name in clips},
        "tokenizer": options.tokenizer and fingerprint(options.tokenizer),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        **provenance(device),
    }
    tasks = [
        Task(model, strategy, clip)
        for model in models
        for clip in clips
        if clip not in failed
        for strategy in options.names()
    ]
    path = options.out / (LIKELIHOOD_FILE if options.teacher_forced else RESULTS_FILE)
    num_measured = 0
    with appending(path) as append:
        before = read_results(path)
        check_same(path, before, run)
        done = before.done()
        missing = [task for task in tasks if tuple(task) not in done]
        if missing:
            run["run"] = len(before.runs)
            append(run)
            make = (lambda: meter) if pool.is_this_process else partial(ClipMeter, options, dtype)
            outcomes = do_tasks(missing, make, pool)
            with progress("clips x strategies", len(tasks), len(tasks) - len(missing)) as job:
                for task, outcome in outcomes:
                    if isinstance(outcome, ValueError):
                        failed.setdefault(task.clip, str(outcome))
                    else:
                        append({**_keep_frames(options, outcome), "run": run["run"]})
                        num_measured += 1
                    job.advance()
    results = read_results(path)
    if not results.clips:
        raise ValueError(next(iter(failed.values())))
    comparison = compare_likelihood(results) if options.teacher_forced else compare(results)
    console = make_console()
    comparison.print(console)
    for clip, why in failed.items():
        console.print(f"{clip} could not be measured: {why}")
    return {
        "results": str(path),
        "measured": num_measured,
        "failed": failed,
        "notes": comparison.notes,
        "rows": comparison.rows,
    }


def _keep_frames(options: EvaluateOptions, outcome: Outcome) -> Record:
    """Write the video, if there is one, and return the line that names it."""
    record, video = outcome.record, None
    if outcome.frames is not None:
        video = video_path(*key_of(record))
        write_video(options.out / video, outcome.frames, record["fps"])
    return {**record, "video": video}
