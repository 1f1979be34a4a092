"""Permanence of a world when one turns back: away for n frames, and back for as many.

A dream turns away from the last given picture, stands still for a frame, and turns back; then it
should show that picture again. Each frame is compared with it, so quality falls to the turning
point and, with a memory, rises again. Beside it stand the tokenizer's reconstruction of the
picture, which no dream can be better than, and chance: the last given picture of another clip.

ViZDoom's turns are slow in the first tics of a turn; with the frame in between, both turns are, and
the game itself comes back to the very pixel (measured), if the player stands still to begin with.
"""

from typing import Any

import numpy as np

from diagd.evaluation.results import (
    QUALITY,
    Record,
    Results,
    bootstrap_interval,
    grouped,
    per_horizon,
)
from diagd.evaluation.tables import Column

CHANCE = "chance"
REVISIT_BASELINES = ("reconstruction", CHANCE)


def _columns(name: str, digits: int) -> tuple[Column, ...]:
    form, signed, above = f"{{:.{digits}f}}", f"{{:+.{digits}f}}", f"{name}.above"
    return (
        Column(f"{name}.turned", f"{name.upper()} turned", form),
        Column(f"{name}.back", "back", form),
        Column(f"{above}_turned", "back - turned", signed, f"{above}_turned_interval"),
        Column(f"{above}_chance", "back - chance", signed, f"{above}_chance_interval"),
    )


COLUMNS = _columns("psnr", 2), _columns("ssim", 3), _columns("lpips", 3)


def walk(away: str, back: str, still: str, num_frames: int) -> list[str]:
    """Return the actions: `away` for so many frames, `still` for one, `back` for as many."""
    return [away] * num_frames + [still] + [back] * num_frames


def summarize_revisit(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model and strategy.

    A row holds `clips`, and for each metric None or means over clips: `back`, of the last frame,
    and `turned`, of the frame at the turning point; how far `back` is above `turned`,
    `above_turned`, and above chance on the same clips, `above_chance`; and 95% intervals of both,
    `above_turned_interval` and `above_chance_interval`. Baselines do not turn, and chance is not
    compared with itself.
    """
    groups = grouped(results)
    num_frames = results.runs[-1]["settings"]["revisit"]
    rows: list[dict[str, Any]] = []
    for (model, strategy), clips in groups.items():
        chance = {} if strategy == CHANCE else groups.get((model, CHANCE), {})
        row: dict[str, Any] = {"model": model, "strategy": strategy, "clips": len(clips)}
        turning = None if strategy in REVISIT_BASELINES else num_frames
        rows.append(row | {name: _metric(name, clips, chance, turning) for name in QUALITY})
    return rows


def _metric(
    name: str, clips: dict[str, Record], chance: dict[str, Record], turning: int | None
) -> dict[str, Any] | None:
    values = per_horizon(clips, name)
    if values is None:
        return None
    back, last = values[:, -1], {clip: one["quality"][name][-1] for clip, one in chance.items()}
    both = [(value, last[clip]) for clip, value in zip(clips, back, strict=True) if clip in last]
    above = {
        "turned": [] if turning is None else back - values[:, turning],
        "chance": [value - other for value, other in both],
    }
    summary: dict[str, Any] = {
        "back": float(back.mean()),
        "turned": None if turning is None else float(values[:, turning].mean()),
    }
    for other, differences in above.items():
        found = np.array(differences, dtype=np.float64)
        summary[f"above_{other}"] = float(found.mean()) if len(found) else None
        summary[f"above_{other}_interval"] = bootstrap_interval(found)
    return summary


def revisit_notes(settings: Record) -> list[str]:
    """Explain the rows of a run with these settings."""
    away, back = settings["revisit_actions"]
    return [
        f"After {settings['context_frames']} given frames: {away} for {settings['revisit']}, "
        f"nothing for one, {back} for {settings['revisit']}. All frames are compared with the last "
        "given one: turned is the one at the turning point, back the last one.",
        "Chance is the last given picture of another clip; the reconstruction is the best that the "
        "tokenizer can show. Intervals are 95% bootstrap intervals over clips, paired.",
    ]
