"""Time training on this machine's CPU with attention by our kernels and by PyTorch, in turns.

python runs/train_speed.py

Loss and gradients of random tokens in bfloat16 autocast, without an optimiser's step; compiling
comes first and is not timed. Leave the machine alone. Writes train_speed.json.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn

from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.system import provenance
from diagd.training.mixture import ViewLoss
from diagd.training.options import parse_mixture


class Case(NamedTuple):
    """What a step is taken on: sequences of frames, the first one given, under a strategy."""

    frames: int
    sequences: int
    strategy: str


CASES = (Case(4, 4, "raster"), Case(4, 4, "k=1"), Case(8, 2, "raster"), Case(8, 2, "k=1"))


@dataclass(frozen=True)
class Options:
    """Time every case with both."""

    out: Path = Path("docs/results")  # folder for train_speed.json
    model: str = "mc-ar-doom"
    cases: tuple[Case, ...] = CASES
    repeats: int = 7
    compile: bool = True


def main(options: Options) -> None:
    """Write and print tokens a second: medians, and the spread."""
    config = PRESETS[options.model]
    model = Transformer.random(config)
    rows = []
    for case in options.cases:
        (strategy,) = parse_mixture([case.strategy])
        grid = TokenGrid(case.frames - 1, config.grid_height, config.grid_width)
        layout = SequenceLayout(grid, config.num_action_tokens, 1)
        view = teacher_view(strategy.schedule(grid), layout, learn_context=True)
        ours, theirs = (ViewLoss(view, torch.device("cpu"), options.compile) for _ in range(2))
        if ours.rounded is None:
            raise ValueError("no kernels for training on this machine: it needs AVX512_BF16")
        theirs.rounded = None
        length = case.frames * layout.slots_per_frame - config.num_action_tokens
        generator = torch.Generator().manual_seed(0)
        shape = case.sequences, length
        tokens = torch.randint(config.image_vocab_size, shape, generator=generator)
        losses = {"ours": ours, "pytorch": theirs}
        for loss in losses.values():
            seconds(model, loss, tokens)
        times: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(options.repeats):
            for name, loss in losses.items():
                times[name].append(seconds(model, loss, tokens))
        row: dict[str, Any] = case._asdict() | {
            name: {
                "tokens_per_second": round(tokens.numel() / statistics.median(took)),
                "seconds": [min(took), statistics.median(took), max(took)],
            }
            for name, took in times.items()
        }
        speeds = [row[name]["tokens_per_second"] for name in losses]
        print(f"{case}: {speeds[0]} and {speeds[1]} tokens/s, {speeds[0] / speeds[1]:.2f}x")
        rows.append(row)
    about = {"model": options.model, **provenance(torch.device("cpu"))}
    write_json(options.out / "train_speed.json", {**about, "cases": rows}, indent=1)


def seconds(model: nn.Module, loss: ViewLoss, tokens: Tensor) -> float:
    """Return what the loss and its gradients take."""
    model.zero_grad()
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model, tokens)
    value.backward()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(tyro.cli(Options))
