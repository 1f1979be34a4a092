"""What a generation leaves: the video, its contact sheet, and a table of what it took."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diagd.console import print_table
from diagd.data.saving import SHEET_COLUMNS, save_frames
from diagd.data.video import contact_sheet, write_image
from diagd.pipeline.generated_video import GeneratedVideo


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
