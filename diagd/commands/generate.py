"""What a generation leaves: the video, its contact sheet, and a table of what it took."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diagd.console import make_console, print_table, waiting
from diagd.data.video import SHEET_COLUMNS, contact_sheet, save_frames, write_image
from diagd.decoding.strategies.strategy import Raster, Strategy
from diagd.flags import output_file
from diagd.pipeline.generator import GeneratedVideo
from diagd.pipeline.many_prompts import continue_prompts, print_report
from diagd.pipeline.options import GenerateOptions
from diagd.pipeline.recipe import PreparedWorld


def write_generated(
    output: Path, sheet: Path, context: Tensor, videos: list[GeneratedVideo], fps: float
) -> None:
    """Write the context followed by what was generated; several videos stand side by side.

    Args:
        output: see `save_frames`; nothing but the sheet is written if it is the sheet.
        sheet: the frames of each video as one picture, a video below the other.
    """
    whole = [torch.cat([context, video.frames]) for video in videos]
    if output != sheet:
        save_frames(output, torch.cat(whole, dim=2), fps)
    sheets = [contact_sheet(frames, SHEET_COLUMNS) for frames in whole]
    write_image(sheet, torch.cat(sheets, dim=0))


def report_runs(runs: list[tuple[str, GeneratedVideo]]) -> list[dict[str, Any]]:
    """Return one record a run; speeds are over the first one, where that has as many frames."""
    report = [{"schedule": name, **asdict(video.stats)} for name, video in runs]
    first = runs[0][1]
    for row, (_, video) in zip(report, runs, strict=True):
        row["num_frames"] = len(video.frames)
        row["frames_per_second"] = len(video.frames) / row["seconds"]  # a grid may be several
        equal_work = len(video.frames) == len(first.frames)
        row["speedup"] = report[0]["seconds"] / row["seconds"] if equal_work else None
    for row, (_, video) in list(zip(report, runs, strict=True))[1:]:
        both = min(len(first.tokens), len(video.tokens))
        equal = (first.tokens[:both] == video.tokens[:both]).float().mean().item()
        row["tokens_equal_to_raster"] = equal
    return report


def print_runs(console: Console, report: list[dict[str, Any]], title: str) -> None:
    """Print the table, and what became of a full context."""
    lines = [
        [
            row["schedule"],
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


RASTER_FRAMES = 2


def main(options: GenerateOptions) -> dict[str, Any]:
    """Generate, write, report."""
    if options.prompts is None or options.out is None:
        return _continue_one(options)
    report = continue_prompts(options, options.prompts, options.out, options.pool())
    print_report(report, make_console())
    return report


def _continue_one(options: GenerateOptions) -> dict[str, Any]:
    console = make_console()
    sheet = options.output.with_suffix(".png")
    prompt_file = options.prompt or Path(options.model) / "prompt.mp4"
    for path in map(output_file, (options.output, sheet)):
        if path.exists() and prompt_file.exists() and path.samefile(prompt_file):
            raise ValueError(f"output would overwrite the prompt {path}: choose another name")
    prepared = PreparedWorld(options)
    num_frames, strategy = prepared.num_frames, prepared.strategy
    prompt = prepared.read(options.prompt)
    for note in prompt.notes:
        console.print(note)
    step = prepared.world.tokenizer.temporal_compression
    timed = (RASTER_FRAMES if step == 1 else 0) if options.raster_frames is None else 0
    timed = num_frames if options.compare else min(num_frames, options.raster_frames or timed)
    timed = -(-timed // step) * step if strategy != Raster() else 0

    def run(one: Strategy, count: int) -> GeneratedVideo:
        with waiting(f"generating {count} frames, {one}"):
            return prepared.generate(prompt, count, one, options.seed)

    runs: list[tuple[str, GeneratedVideo]] = []
    if (size := min(timed, num_frames - 1) or step) < num_frames:
        run(strategy, step)  # warms up
        sample = run(strategy, size)
        seconds = sample.stats.seconds * num_frames / size
        console.print(f"{num_frames} frames, {strategy}: expect about {seconds:.3g} s here")
        runs = [(strategy.name, sample)] if size == timed else []
    if timed:
        runs.insert(0, (Raster().name, run(Raster(), timed)))
    runs.append((strategy.name, run(strategy, num_frames)))
    shown = [video for _, video in runs if len(video.frames) == num_frames]
    shown = shown[-2:] if options.compare else shown[-1:]
    write_generated(options.output, sheet, prompt.frames, shown, prompt.fps)
    report = report_runs(runs)
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print_runs(console, report, f"{options.model} on {prepared.device}{threads}, {prepared.dtype}")
    wrote = " and ".join(map(str, dict.fromkeys([options.output, sheet])))
    console.print(f"wrote {wrote}")
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}
