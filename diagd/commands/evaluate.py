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
from diagd.evaluation.captions import metric_notes, print_summary
from diagd.evaluation.drift import drift_notes, print_drift, summarize_drift
from diagd.evaluation.measure import (
    LIKELIHOOD_FILE,
    ClipMeter,
    Outcome,
    Task,
    choose_clips,
    fingerprint_clips,
    measure_likelihood,
    print_likelihood,
    summarize_likelihood,
)
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import (
    BASELINES,
    RESULTS_FILE,
    ResultsWriter,
    check_same,
    key_of,
    read_results,
    summarize,
    video_path,
)
from diagd.evaluation.revisit import (
    print_revisit,
    revisit_notes,
    summarize_revisit,
)
from diagd.families.checkpoints import model_path
from diagd.system import fingerprint, provenance
from diagd.workers import do_tasks


def main(options: EvaluateOptions) -> dict[str, Any]:
    """Measure what is not there yet, then print the table."""
    console = make_console()
    device = device_of(options.device)
    settings = options.settings(choose_dtype(options.dtype, device))
    fingerprints = {label: fingerprint(model_path(name)) for label, name in settings.models.items()}
    clips = choose_clips(options.clips, options.length("num_clips"), options.seed)
    tasks = [
        Task(model, method, clip)
        for model in settings.models
        for clip in clips
        for method in options.methods()
    ]
    meter = ClipMeter(settings, options.save_videos)
    pool = options.pool()
    if pool.is_this_process:  # else others load the models
        for label in reversed(settings.models):  # the first one stays loaded
            meter.check(label, options.strategies(), clips)
    run = {
        "kind": "run",
        "settings": json.loads(json.dumps(asdict(settings), default=str)),
        "metrics": meter.provenance,
        "models": fingerprints,
        "clips": fingerprint_clips(options.clips, clips),
        "tokenizer": options.tokenizer and fingerprint(options.tokenizer),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        **provenance(device),
    }
    if options.teacher_forced:
        forced = [task for task in tasks if task.method not in BASELINES]
        gaps = summarize_likelihood(measure_likelihood(meter, forced, options.out, run))
        print_likelihood(gaps, console)
        return {"results": str(options.out / LIKELIHOOD_FILE), "rows": gaps}
    path = options.out / RESULTS_FILE
    with ResultsWriter(path) as writer:
        before = read_results(path)
        check_same(path, before, run)
        done = before.done()
        missing = [task for task in tasks if tuple(task) not in done]
        if missing:
            run["run"] = len(before.runs)
            writer.append(run)
            make = partial(ClipMeter, settings, options.save_videos)
            outcomes = do_tasks(missing, (lambda: meter) if pool.is_this_process else make, pool)
            with progress("clips x methods", len(tasks), len(tasks) - len(missing)) as job:
                for _, outcome in outcomes:
                    if isinstance(outcome, ValueError):
                        raise outcome
                    _keep(options, outcome, writer, run["run"])
                    job.advance()
    results = read_results(path)
    if options.drift:
        rows = summarize_drift(results)
        print_drift(rows, console)
        notes = drift_notes(results, rows)
    elif options.revisit:
        rows = summarize_revisit(results)
        print_revisit(rows, console)
        notes = revisit_notes(results)
    else:
        rows = summarize(results)
        print_summary(rows, console)
        notes = metric_notes(results, rows)
    for note in notes:
        console.print(note)
    return {"results": str(path), "measured": len(missing), "notes": notes, "rows": rows}


def _keep(options: EvaluateOptions, outcome: Outcome, writer: ResultsWriter, run: int) -> None:
    """Write the video, then the line that speaks of it."""
    record = outcome.record
    video = None
    if options.save_videos:
        video = video_path(*key_of(record))
        write_video(options.out / video, outcome.frames, record["fps"])
    writer.append({**record, "run": run, "video": video})
