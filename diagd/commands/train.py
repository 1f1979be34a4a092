"""Train a world model on token shards: next-token prediction over interleaved frames and actions.

The loss counts visual tokens only, since actions are always given. Optimisation defaults are the
paper's (arXiv:2503.14070, appendix).

    diagd train --tokens tokens/train --validation tokens/heldout --out models/doom
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diagd.families.presets import PRESETS
from diagd.training.loop import LoopOptions, TrainingRun, read_clips
from diagd.training.setup import fit_config, start_model


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LoopOptions):
    """Train MC-AR, a LLaMA decoder over frame and action tokens, from token shards."""

    model: str = "mc-ar-doom"  # preset: mc-ar-doom, mc-ar-42m, mc-ar-300m, mc-ar-700m, mc-ar-1.2b
    init: str | None = None  # checkpoint folder to take the weights from, instead of random ones
    steps: int = 100_000  # optimiser steps
    warmup_steps: int = 10_000  # steps of linear warm-up

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        super().__post_init__()


def main(options: TrainOptions) -> dict[str, float]:
    """Train to the last step, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    model = start_model(
        fit_config(options.model, clips, options.frames), options.seed, options.init
    )
    plain = next_token_loss
    quick = torch.compile(plain) if options.compile else plain
    size = clips.codebook_size
    run = TrainingRun(options, clips, model)
    run.resume()
    run.train(lambda model, tokens, step: quick(model, tokens, size))
    report: dict[str, float] = {"steps": options.steps}
    if held_out is not None:
        report["validation_loss"] = run.validation_loss(
            held_out, lambda model, tokens, step: plain(model, tokens, size)
        )
    return report


def next_token_loss(model: torch.nn.Module, tokens: Tensor, image_vocab_size: int) -> Tensor:
    """Mean negative log-likelihood of the visual tokens, in nats."""
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    targets = tokens[:, 1:].flatten()
    targets = torch.where(targets < image_vocab_size, targets, -100)
    return functional.cross_entropy(logits, targets, ignore_index=-100)
