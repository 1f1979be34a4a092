"""Whether a world is still there when one turns back: away for n frames, and back for as many.

A dream turns away from the last given picture, stands still for a frame, and turns back; then it
should show that picture again. Each frame is compared with it, so quality falls to the turning
point and, with a memory, rises again. Beside it stand the tokenizer's reconstruction of the
picture, which no dream can be better than, and chance: the last given picture of another clip.

ViZDoom's turns are slow in the first tics of a turn; with the frame in between, both turns are, and
the game itself comes back to the very pixel (measured), if the player stands still to begin with.
Knows no torch, as `summary`.
"""

from typing import Any

import numpy as np
from rich.console import Console

from diagd.console import print_tables
from diagd.evaluation.results import (
    QUALITY,
    Record,
    Results,
    bootstrap_interval,
    grouped,
    per_horizon,
)

CHANCE = "chance"
REVISIT_BASELINES = ("reconstruction", CHANCE)
DIGITS = {"psnr": 2, "ssim": 3, "lpips": 3}


def walk(away: str, back: str, still: str, num_frames: int) -> list[str]:
    """Return the actions: `away` for so many frames, `still` for one, `back` for as many."""
    return [away] * num_frames + [still] + [back] * num_frames


def summarize_revisit(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model and method.

    A row holds `clips`, and for each metric None or means over clips: `back`, of the last frame,
    and `turned`, of the frame at the turning point; how far `back` is above `turned`,
    `above_turned`, and above chance on the same clips, `above_chance`; and 95% intervals of both,
    `above_turned_interval` and `above_chance_interval`. Baselines do not turn.
    """
    groups = grouped(results)
    num_frames = results.runs[-1]["settings"]["revisit"]
    rows: list[dict[str, Any]] = []
    for (model, method), clips in groups.items():
        chance = groups.get((model, CHANCE), {})
        row: dict[str, Any] = {"model": model, "method": method, "clips": len(clips)}
        turning = None if method in REVISIT_BASELINES else num_frames
        row |= {name: _metric(name, clips, chance, turning) for name in QUALITY}
        rows.append(row)
    return rows


def _metric(
    name: str, clips: dict[str, Record], chance: dict[str, Record], turning: int | None
) -> dict[str, Any] | None:
    values = per_horizon(clips, name)
    if values is None:
        return None
    back = dict(zip(clips, values[:, -1], strict=True))
    both = [clip for clip in clips if clip in chance]
    above = {
        "turned": [] if turning is None else values[:, -1] - values[:, turning],
        "chance": [back[clip] - chance[clip]["quality"][name][-1] for clip in both],
    }
    summary: dict[str, Any] = {
        "back": float(values[:, -1].mean()),
        "turned": None if turning is None else float(values[:, turning].mean()),
    }
    for other, differences in above.items():
        found = np.array(differences, dtype=np.float64)
        summary[f"above_{other}"] = float(found.mean()) if len(found) else None
        summary[f"above_{other}_interval"] = bootstrap_interval(found)
    return summary


def is_revisit(results: Results) -> bool:
    """Say whether these are results of `diagd evaluate --revisit`."""
    return bool(results.runs and results.runs[-1]["settings"].get("revisit"))


def print_revisit(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table for each model."""
    print_tables(console, [row["model"] for row in rows], *revisit_cells(rows))


def revisit_cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header of the table, from the method on, and the cells of each row."""
    shown = [name for name in QUALITY if any(row[name] for row in rows)]
    header = ["method", "clips"]
    for name in shown:
        header += [f"{name.upper()} turned", "back", "back - turned", "back - chance"]
    cells: list[list[str]] = []
    for row in rows:
        line = [row["method"], str(row["clips"])]
        for name in shown:
            value, digits = row[name], DIGITS[name]
            line += [_number(value["turned"], digits), _number(value["back"], digits)]
            for other in ("turned", "chance"):
                above, edges = value[f"above_{other}"], value[f"above_{other}_interval"]
                spread = f" [{edges[0]:+.{digits}f}, {edges[1]:+.{digits}f}]" if edges else ""
                is_itself = row["method"] == other
                line.append("-" if above is None or is_itself else f"{above:+.{digits}f}{spread}")
        cells.append(line)
    return header, cells


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def revisit_notes(results: Results) -> list[str]:
    """Return what to know about a table of these rows."""
    settings = results.runs[-1]["settings"]
    away, back = settings["revisit_actions"]
    return [
        f"After {settings['context_frames']} given frames: {away} for {settings['revisit']}, "
        f"nothing for one, {back} for {settings['revisit']}. All frames are compared with the last "
        "given one: turned is the one at the turning point, back the last one.",
        "Chance is the last given picture of another clip; the reconstruction is the best that the "
        "tokenizer can show. Brackets are 95% bootstrap intervals over clips, paired.",
    ]
