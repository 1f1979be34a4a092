"""Generate a video from a prompt; write it with a contact sheet, and print what it took.

diagd generate                 # the bundled model, its prompt: dream.mp4
diagd generate --actions "forward*8,left*8" --compare
diagd generate --prompt photo.jpg --actions forward --output dream.gif
diagd generate --model WHAM_200M.ckpt --prompt clip.npz
diagd generate --model Cosmos-Predict1-4B --tokenizer DV8x16x16-720p
diagd generate --prompts clips --out dreams --workers 2   # one for each
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from diagd.console import make_console, print_table, waiting
from diagd.data.video import contact_sheet, save_frames, write_image
from diagd.decoding.strategies.strategy import Strategy
from diagd.decoding.strategies.table import Raster
from diagd.flags import output_file
from diagd.pipeline.generator import GeneratedVideo
from diagd.pipeline.many_prompts import PromptWorker, continue_prompts, print_report
from diagd.pipeline.options import GenerateOptions
from diagd.pipeline.prompts import Prompt

RASTER_FRAMES = 2


def main(options: GenerateOptions) -> dict[str, Any]:
    """Generate, write, report."""
    if options.prompts is None or options.out is None:
        return _continue_one(options)
    report = continue_prompts(options, options.prompts, options.out)
    print_report(report, make_console())
    return report


def _continue_one(options: GenerateOptions) -> dict[str, Any]:
    console = make_console()
    sheet = options.output.with_suffix(".png")
    prompt_file = options.prompt or Path(options.model) / "prompt.mp4"
    for path in map(output_file, (options.output, sheet)):
        if path.exists() and prompt_file.exists() and path.samefile(prompt_file):
            raise ValueError(f"output would overwrite the prompt {path}: choose another name")
    worker = PromptWorker(options)
    prompt = worker.read(options.prompt)
    for note in prompt.notes:
        console.print(note)
    runs = _run(worker, prompt, console)
    shown = [video for _, video in runs if len(video.frames) == worker.num_frames]
    _write(options.output, sheet, prompt, shown[-2:] if options.compare else shown[-1:])
    report = _report(runs)
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    title = f"{options.model} on {worker.device}{threads}, {worker.world.dtype}"
    _print_runs(console, report, title)
    console.print(f"wrote {' and '.join(map(str, dict.fromkeys([options.output, sheet])))}")
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}


def _run(
    worker: PromptWorker, prompt: Prompt, console: Console
) -> list[tuple[Strategy, GeneratedVideo]]:
    """Generate the video, after a sample and some frames in raster order to compare with."""
    options, num_frames, strategy = worker.options, worker.num_frames, worker.strategy

    def generate(strategy: Strategy, count: int) -> GeneratedVideo:
        with waiting(f"generating {count} frames, {strategy}"):
            return worker.generate(prompt, count, strategy, options.seed)

    step = worker.world.tokenizer.temporal_compression
    timed = options.raster_frames
    if timed is None:
        timed = RASTER_FRAMES if step == 1 else 0
    timed = num_frames if options.compare else min(num_frames, timed)
    timed = -(-timed // step) * step if strategy != Raster() else 0

    runs: list[tuple[Strategy, GeneratedVideo]] = []
    size = min(timed, num_frames - 1) or step
    if size < num_frames:
        generate(strategy, step)  # warms up
        sample = generate(strategy, size)
        seconds = sample.stats.seconds * num_frames / size
        console.print(f"{num_frames} frames, {strategy}: expect about {seconds:.3g} s here")
        runs = [(strategy, sample)] if size == timed else []
    if timed:
        runs.insert(0, (Raster(), generate(Raster(), timed)))
    return [*runs, (strategy, generate(strategy, num_frames))]


def _write(output: Path, sheet: Path, prompt: Prompt, videos: list[GeneratedVideo]) -> None:
    """Write the prompt followed by what was generated; several videos stand side by side."""
    whole = [torch.cat([prompt.frames, video.frames]) for video in videos]
    if output != sheet:
        save_frames(output, torch.cat(whole, dim=2), prompt.fps)
    sheets = [contact_sheet(frames) for frames in whole]
    write_image(sheet, torch.cat(sheets, dim=0))


def _report(runs: list[tuple[Strategy, GeneratedVideo]]) -> list[dict[str, Any]]:
    """Return one record a run; speeds are over the first one, where that has as many frames."""
    (_, first), report = runs[0], []
    for strategy, video in runs:
        seconds, num_frames = video.stats.seconds, len(video.frames)
        row = {"strategy": strategy.name, **asdict(video.stats), "num_frames": num_frames}
        row["frames_per_second"] = num_frames / seconds  # a grid may be several
        equal_work = num_frames == len(first.frames)
        row["speedup"] = first.stats.seconds / seconds if equal_work else None
        if report:
            both = min(len(first.tokens), len(video.tokens))
            equal = first.tokens[:both] == video.tokens[:both]
            row["tokens_equal_to_raster"] = equal.float().mean().item()
        report.append(row)
    return report


def _print_runs(console: Console, report: list[dict[str, Any]], title: str) -> None:
    lines = [
        [
            row["strategy"],
            str(row["num_frames"]),
            str(row["num_steps"]),
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['frames_per_second']:.2f}",
            f"{row['speedup']:.1f}x" if len(report) > 1 and row["speedup"] else "-",
        ]
        for row in report
    ]
    header = "", "frames", "steps", "seconds", "tokens/s", "frames/s", "speedup"
    print_table(console, title, header, lines)
    if dropped := report[-1]["num_dropped_frames"]:
        console.print(f"the model's context was full: its {dropped} oldest frames were forgotten")
