"""Look through recorded clips before training: files, actions, and which row led to which frame.

diagd check clips
"""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from diagd.console import make_console, print_table
from diagd.training.clip_check import CheckedClip, ClipsReport, RowTiming, check_clips
from diagd.training.options import CheckOptions

SHOWN_FRAMES = 6
ROWS = {-1: "row t - 1", 0: "row t", 1: "row t + 1"}


def main(options: CheckOptions) -> dict[str, Any]:
    """Print what the clips hold, and refuse them if they cannot be trained on."""
    report = check_clips(options.clips)
    _print_report(report)
    if report.problems:
        more = len(report.problems) - 1
        raise ValueError(report.problems[0] + (f" (and {more} more above)" if more else ""))
    first, timing = report.clips[0], report.timing
    return {
        "clips": len(report.clips),
        "frames": sum(clip.num_frames for clip in report.clips),
        "size_px": first.size_px,
        "fps": float(first.fps),
        "actions": {name: asdict(use) for name, use in report.uses.items()},
        "timing": timing and {"found": timing.found, **asdict(timing)},
        "notes": report.notes,
    }


def _print_report(report: ClipsReport) -> None:
    console = make_console()
    if report.clips:
        first = report.clips[0]
        frames = sum(clip.num_frames for clip in report.clips)
        seconds = round(frames / first.fps)
        console.print(
            f"{len(report.clips)} clips, {frames} frames of {first.size_px[0]}x{first.size_px[1]} "
            f"px, {float(first.fps):g} a second: {seconds // 60}:{seconds % 60:02d} minutes"
        )
        if report.timing is not None:
            _print_rows(console, first)
            cells = "{0.frames} {0.share:.1%} {0.held_frames:.1f} {0.change:.1f}"
            rows = [[name, *cells.format(use).split()] for name, use in report.uses.items()]
            print_table(console, "", ["action", "frames", "share", "held for", "change"], rows)
            console.print(
                "held for: frames, on average; change: of a pixel from frame to frame, of 255"
            )
            _print_timing(console, report.timing)
    for kind, lines in (("note", report.notes), ("problem", report.problems[1:])):
        for line in lines:
            console.print(f"{kind}: {line}")


def _print_rows(console: Console, clip: CheckedClip) -> None:
    """Explain in one sentence, and show, how rows and frames belong together."""
    actions = clip.actions
    changes = (t for t in range(2, len(actions)) if actions[t] != actions[t - 1])
    start = max(min(next(changes, 2) - 2, len(actions) - SHOWN_FRAMES), 0)
    console.print(
        "Row t of an action file, counted from 0, is read as the action that led from frame t - 1 "
        f"to frame t. In {clip.path.name}:"
    )
    for t in range(start, min(start + SHOWN_FRAMES, len(actions))):
        came = f"frame {t - 1} -> {actions[t]} -> " if t else f"({actions[0]}, at the start) "
        console.print(f"  row {t}: {came}frame {t}")


def _print_timing(console: Console, timing: RowTiming) -> None:
    if timing.gains:
        rows = [
            [
                ROWS[n] + " <-" * (n == timing.found),
                f"{max(gain, 0):.1%}",
                f"{timing.scores[n]:.1f}",
            ]
            for n, gain in timing.gains.items()
        ]
        print_table(console, "", ["frame t tells of", "gain", "standard errors"], rows)
        console.print("gain: how much the movement into frame t tells beyond the rows before")
    if timing.found == 0:
        console.print("So row t led to frame t, as it should.")
    elif timing.found is None:
        why = "more clips may tell" if timing.gains else "too few frames, actions or movement"
        console.print(f"Which row led to frame t cannot be told from these pictures: {why}.")
