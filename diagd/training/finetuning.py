"""Diagonal finetuning: teach a model what it sees while it decodes along diagonals.

A model trained in raster order has never predicted a token whose left neighbours of the row above
are there and the right ones are not, nor one at a row's start behind a stand-in. A short training
under exactly that visibility (arXiv:2503.14070, section 3.3; `diagd.decoding.teacher_forcing`)
closes much of the gap. It is the loop of `diagd train`; only the lanes and the mask differ.
"""

from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from torch import Tensor, nn

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import RowStart, check_row_start
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.checkpoints import load_model, model_path
from diagd.files import write_json
from diagd.flags import FrameLag, RowLag
from diagd.training.loop import TrainingRun, read_clips
from diagd.training.losses import ViewLoss
from diagd.training.options import LoopOptions
from diagd.training.setup import check_fit, frames_held
from diagd.training.world_parts import copy_parts, next_steps

SCHEDULE_FILE = "finetune.json"


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(LoopOptions):
    """Finetune a model for a diagonal schedule; the result is a folder that `generate` takes."""

    init: str  # model to start from: doom, or a checkpoint folder
    row_lag: RowLag = 1  # columns a row runs ahead of the next
    frame_lag: FrameLag = None  # steps between frames; default: a frame starts when one is whole
    row_start: RowStart = "temporal"  # whose token stands in for an unknown predecessor
    context_frames: int = 1  # frames at the start that are given, in raster order, and not learnt
    raster_share: float = 0.0  # share of the steps that are taken under the raster mask
    steps: int = 1000  # optimiser steps
    warmup_steps: int = 20  # steps of linear warm-up

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row_start(self.row_start)
        if not 1 <= self.context_frames < self.frames:
            raise ValueError(
                f"context_frames must be in [1, frames={self.frames}), got {self.context_frames}"
            )
        if not 0 <= self.raster_share < 1:
            raise ValueError(f"raster_share must be in [0, 1), got {self.raster_share}")

    def schedule(self, height: int, width: int) -> DiagonalSchedule:
        """Return the schedule that the flags name, for the frames that are learnt."""
        grid = TokenGrid(self.frames - self.context_frames, height, width)
        if self.frame_lag is None:
            return DiagonalSchedule.spatial(grid, self.row_lag)
        return DiagonalSchedule(grid, self.row_lag, self.frame_lag)


def finetune(options: FinetuneOptions) -> dict[str, float]:
    """Finetune to the last step, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    model = load_model(options.init)
    check_fit(options.init, model.config, clips)
    most = frames_held(model.config)
    if options.frames > most:
        raise ValueError(
            f"frames must be at most {most}, which the model holds, got {options.frames}"
        )
    schedule = options.schedule(model.config.grid_height, model.config.grid_width)
    layout = SequenceLayout(schedule.grid, 1, options.context_frames)
    purpose = {
        "row_lag": schedule.row_lag,
        "frame_lag": schedule.frame_lag,
        "init": options.init,
        "row_start": options.row_start,
        "context_frames": options.context_frames,
        "frames": options.frames,
        "raster_share": options.raster_share,
    }
    run = TrainingRun(options, clips, model, {"finetune": purpose})
    run.resume()
    if run.accelerator.is_main_process:
        copy_parts(model_path(options.init), options.out)
        write_json(options.out / SCHEDULE_FILE, {**purpose, "options": asdict(options)})
    diagonal, raster = (
        ViewLoss(view, run.accelerator.device, options.compiles)
        for view in (
            teacher_view(schedule, layout, options.row_start),
            teacher_view(DiagonalSchedule.raster(schedule.grid), layout),
        )
    )

    def loss(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        generator = torch.Generator().manual_seed((options.seed << 40) + step)
        is_raster = torch.rand((), generator=generator).item() < options.raster_share
        return (raster if is_raster else diagonal)(model, tokens, step)

    run.train(loss)
    report: dict[str, float] = {"steps": run.step}
    if held_out is not None:
        report["validation_loss"] = run.validation_loss(held_out, diagonal)
        report["validation_loss_raster"] = run.validation_loss(held_out, raster)
    console = Console(stderr=True, quiet=not run.accelerator.is_main_process)
    console.print(next_steps(options.out, options.tokens))
    return report
