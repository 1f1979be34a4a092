"""Pretraining: next-token prediction over interleaved frames and actions, from token shards.

Optimisation defaults are the paper's (arXiv:2503.14070, appendix).
"""

from dataclasses import dataclass

import torch

from diagd.families.presets import PRESETS
from diagd.training.loop import LoopOptions, TrainingRun, read_clips
from diagd.training.losses import next_token_loss
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


def pretrain(options: TrainOptions) -> dict[str, float]:
    """Train to the last step, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    config = fit_config(options.model, clips, options.frames)
    model = start_model(config, options.seed, options.init)
    plain, size = next_token_loss, clips.codebook_size
    quick = torch.compile(plain) if options.compile else plain
    run = TrainingRun(options, clips, model)
    run.resume()
    run.train(lambda model, tokens, step: quick(model, tokens, size))
    report: dict[str, float] = {"steps": options.steps}
    if held_out is not None:
        report["validation_loss"] = run.validation_loss(
            held_out, lambda model, tokens, step: plain(model, tokens, size)
        )
    return report
