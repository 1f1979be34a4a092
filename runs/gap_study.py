"""Ask what the rules of visibility are worth: the teacher-forced gap when they are broken.

python runs/gap_study.py --tokens work/maze/tokens/heldout --out work/maze/finetune

Hygiene of the cache is the design's claim: stand-ins are seen by nobody else, and true row ends
always reach the cache. Each claim is broken here, and here only; the product has no such switch.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import Progress
from torch import Tensor

from diagd.console import cell
from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.strategies.table import parse_strategies
from diagd.decoding.teacher_forcing import (
    Sees,
    TeacherView,
    gap_to_raster,
    teacher_view,
    view_nll,
)
from diagd.families.checkpoints import load_model
from diagd.files import write_json, write_text
from diagd.system import settings_of
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import windows
from diagd.training.setup import check_fit


@dataclass(frozen=True)
class Options:
    """Measure on token shards of held-out clips, one context frame."""

    tokens: Path  # folder of token shards
    out: Path  # folder for gap_study.json and gap_study.md
    model: str = "maze"
    strategy: tuple[str, ...] = (  # besides raster; those with a schedule
        "k=1 k=1/predecessor k=1/spatial k=2 k=2/predecessor k=2/spatial",
        "k=4 k=4/predecessor k=4/spatial",
    )
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
    views: dict[str, TeacherView] = {}
    for strategy in parse_strategies(("raster", *options.strategy)):
        if not strategy.has_schedule:
            raise ValueError(f"the study compares schedules: leave {strategy} out")
        views[strategy.name] = teacher_view(strategy.schedule(grid), layout)
    variants = list(rules(views["raster"], layout))
    nll: dict[tuple[str, str], Tensor] = {}
    with Progress() as progress:
        task = progress.add_task("judging", total=len(views) * len(variants) * len(sequences))
        for name, view in views.items():
            for variant, sees in rules(view, layout).items():
                costs = []
                for sequence in sequences.split(1):
                    costs.append(view_nll(model, sequence, view, sees).double().mean())
                    progress.advance(task)
                nll[name, variant] = torch.stack(costs)
    base = nll["raster", "the design"]
    rows = [
        {"strategy": name, "rule": variant, **gap_to_raster(cost, base)}
        for (name, variant), cost in nll.items()
    ]
    document = {"options": settings_of(options), "rows": rows}
    write_json(options.out / "gap_study.json", document, indent=1)
    table = [
        f"Nats a token above raster ({base.mean():.4f}), {options.clips} clips of "
        f"{options.frames} frames, {options.model}; ± standard error over clips.\n",
        "| strategy | " + " | ".join(variants) + " |",
        "|---|" + "---|" * len(variants),
    ]
    for name in views:
        gaps = [row for row in rows if row["strategy"] == name]
        cells = [f"{row['gap']:+.4f} ± " + cell("{gap_error:.4f}", row) for row in gaps]
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    write_text(options.out / "gap_study.md", "\n".join(table) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main(tyro.cli(Options))
