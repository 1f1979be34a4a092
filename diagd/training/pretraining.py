"""Pretraining: prediction of tokens in any order over interleaved frames and actions.

Optimisation defaults are the paper's (arXiv:2503.14070, appendix).
"""

from dataclasses import asdict, dataclass
from typing import Any

from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.training.loop import TrainingRun, read_clips
from diagd.training.mixture import MixtureLoss, MixtureOptions
from diagd.training.setup import fit_config, start_model

RECORD_FILE = "train.json"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(MixtureOptions):
    """Train MC-AR, a LLaMA decoder over frame and action tokens, from token shards."""

    model: str = "mc-ar-doom"  # preset: mc-ar-doom, mc-ar-42m, mc-ar-300m, mc-ar-700m, mc-ar-1.2b
    init: str | None = None  # checkpoint folder to take the weights from, instead of random ones
    steps: int = 100_000  # optimiser steps
    warmup_steps: int = 10_000  # steps of linear warm-up
    strategies: tuple[str, ...] = ("raster",)  # one is drawn for each step: raster k=1:2 k=1,d=14
    context_frames: int = 0  # frames at the start, in raster order, that are not learnt

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        super().__post_init__()


def pretrain(options: TrainOptions) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    config = fit_config(options.model, clips, options.frames)
    model = start_model(config, options.seed, options.init)
    views = options.views(config.grid_height, config.grid_width)
    run = TrainingRun(options, clips, model, {"train": options.purpose()})
    run.resume()
    if run.accelerator.is_main_process:
        write_json(options.out / RECORD_FILE, {**options.purpose(), "options": asdict(options)})
    loss = MixtureLoss(options, views, run.accelerator.device)
    run.train(loss)
    seen = {} if held_out is None else loss.validate(run, held_out)
    return {"steps": options.steps, **seen}
