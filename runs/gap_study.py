"""Ask what the rules of visibility are worth: the teacher-forced gap when they are broken.

python runs/gap_study.py --tokens work/doom/tokens/heldout --out docs/results

Hygiene of the cache is the design's claim: stand-ins are seen by nobody else, and true row ends
always reach the cache. Each claim is broken here, and here only; the product has no such switch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.progress import Progress
from torch import Tensor

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.likelihood import Sees, view_nll
from diagd.decoding.plan import RowStart
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.families.checkpoints import load_model
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import windows
from diagd.training.setup import check_fit


@dataclass(frozen=True)
class Options:
    """Measure on token shards of held-out clips, one context frame, spatial schedules."""

    tokens: Path  # folder of token shards
    out: Path  # folder for gap_study.json and gap_study.md
    model: str = "doom"
    row_lag: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-k"])] = (1, 2, 4)
    row_start: tuple[RowStart, ...] = ("temporal", "predecessor", "spatial")
    clips: int = 16
    frames: int = 8


def rules(view: TeacherView, layout: SequenceLayout) -> dict[str, Sees]:
    """Return the design's rule, and those that break it."""
    first = layout.context_slots
    place = (view.positions - first) % layout.slots_per_frame - layout.num_action_tokens
    is_end = place % layout.grid.width == layout.grid.width - 1
    row_end = (view.positions >= first) & (place >= 0) & is_end & ~view.stand_in
    overwritten = view.steps.roll(-1)  # a stand-in is before the token that takes its place

    def placed(q: Tensor, r: Tensor) -> Tensor:
        """Whether r was fed by then, stands no later, and is a stand-in."""
        earlier = (view.positions[r] <= view.positions[q]) & (view.steps[r] <= view.steps[q])
        return earlier & view.stand_in[r]

    def seen_until_overwritten(q: Tensor, r: Tensor) -> Tensor:
        return view.sees(q, r) | (placed(q, r) & (view.steps[q] < overwritten[r]))

    def row_ends_missing(q: Tensor, r: Tensor) -> Tensor:
        return (view.sees(q, r) & ~row_end[r]) | (q == r)

    def row_ends_replaced(q: Tensor, r: Tensor) -> Tensor:
        return row_ends_missing(q, r) | placed(q, r)

    return {
        "the design": view.sees,
        "stand-ins seen until the true token comes": seen_until_overwritten,
        "true row ends never cached": row_ends_missing,
        "stand-ins cached instead of true row ends": row_ends_replaced,
    }


@torch.inference_mode()
def main(options: Options) -> None:
    """Write the gaps, in nats a token above raster by the design, as JSON and Markdown."""
    model, clips = load_model(options.model).eval(), read_shards(options.tokens)
    check_fit(options.model, model.config, clips)
    tokens, actions = windows(clips, options.clips, options.frames)
    sequences = torch.cat([actions, tokens.flatten(2)], dim=2).flatten(1)[:, 1:]
    grid = TokenGrid(options.frames - 1, *tokens.shape[2:])
    layout = SequenceLayout(grid, 1, 1)
    raster = DiagonalSchedule.raster(grid)
    views = {("raster", ""): teacher_view(raster, layout)}
    for row_lag in options.row_lag:
        schedule = DiagonalSchedule.spatial(grid, row_lag)
        for row_start in options.row_start:
            views[f"k={row_lag}", row_start] = teacher_view(schedule, layout, row_start)
    variants = list(rules(views["raster", ""], layout))
    nll: dict[tuple[str, str, str], Tensor] = {}
    with Progress() as progress:
        task = progress.add_task("judging", total=len(views) * len(variants) * len(sequences))
        for (name, row_start), view in views.items():
            for variant, sees in rules(view, layout).items():
                costs = []
                for sequence in sequences.split(1):
                    costs.append(view_nll(model, sequence, view, sees).double().mean())
                    progress.advance(task)
                nll[name, row_start, variant] = torch.stack(costs)
    base = nll["raster", "", "the design"]
    rows = [
        {
            **{"schedule": name, "row_start": row_start, "rule": variant},
            **{"nll": cost.mean().item(), "gap": (cost - base).mean().item()},
            "gap_error": (cost - base).std().item() / len(cost) ** 0.5,
        }
        for (name, row_start, variant), cost in nll.items()
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"options": {k: str(v) for k, v in asdict(options).items()}, "rows": rows}
    (options.out / "gap_study.json").write_text(json.dumps(document, indent=1) + "\n")
    table = [
        f"Nats a token above raster ({base.mean():.4f}), {options.clips} clips of "
        f"{options.frames} frames, {options.model}; ± standard error over clips.\n",
        "| schedule | row start | " + " | ".join(variants) + " |",
        "|---|---|" + "---|" * len(variants),
    ]
    for name, row_start in views:
        gaps = [row for row in rows if (row["schedule"], row["row_start"]) == (name, row_start)]
        cells = [f"{row['gap']:+.4f} ± {row['gap_error']:.4f}" for row in gaps]
        table.append(f"| {name} | {row_start} | " + " | ".join(cells) + " |")
    (options.out / "gap_study.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main(tyro.cli(Options))
