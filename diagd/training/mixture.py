"""Schedules as data of training: each step is taken under one strategy of a weighted mixture.

    raster                     next-token prediction alone
    raster k=1:2 k=1,d=14      half of the steps under k=1, a quarter under each of the others

The draw of a step is a function of seed and step alone, so neither a kill nor the number of
processes changes it. What a strategy's lanes are and who sees whom is laid out once, before the
first step.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.diagonal import Raster, Scheduled
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.tokenizers.shards import TokenClips
from diagd.training.corruption import Corruption
from diagd.training.loop import TrainingRun
from diagd.training.losses import ViewLoss
from diagd.training.options import Mixture, MixtureOptions
from diagd.training.sequences import generator_of

_DRAW = 1  # tells the generator of a step's strategy from that of its batch


def draw_strategy(mixture: Mixture, seed: int, step: int) -> Scheduled:
    """Return the strategy of a step."""
    ends = list(accumulate(mixture.weights.values()))
    place = torch.rand((), generator=generator_of(seed, step, _DRAW)).item() * ends[-1]
    return next(
        strategy for strategy, end in zip(mixture.weights, ends, strict=True) if place < end
    )


def corruption_of(options: MixtureOptions, num_ids: int, process: int = 0) -> Corruption | None:
    """Return how what is fed becomes wrong, if it does.

    Args:
        num_ids: visual ids.
        process: number of the process that asks.
    """
    if not options.corrupt:
        return None
    return Corruption(options.corrupt, options.corrupt_with, options.seed, num_ids, process)


def views_of(options: MixtureOptions, height: int, width: int) -> dict[Scheduled, TeacherView]:
    """Lay out the strategies, and raster to compare them with, on frames of a size.

    Nothing stands before the first frame, which is therefore in raster order under every
    strategy; with `context_frames=0` it is learnt.

    Raises:
        ValueError: lags that do not fit the grid.
    """
    context_frames = max(1, options.context_frames)
    grid = TokenGrid(options.frames - context_frames, height, width)
    layout = SequenceLayout(grid, 1, context_frames)
    return {
        strategy: teacher_view(
            strategy.schedule(grid),
            layout,
            strategy.row_start,
            learn_context=options.context_frames == 0,
            window=options.window,
        )
        for strategy in (*options.mixture().weights, Raster())
    }


class MixtureLoss:
    """The loss of each step under the strategy that is drawn for it.

    Args:
        views: of the strategies of the options' mixture, and of raster.
        corruption: what makes the tokens fed in training wrong; nothing does in validation.
    """

    def __init__(
        self,
        options: MixtureOptions,
        views: dict[Scheduled, TeacherView],
        device: torch.device,
        corruption: Corruption | None = None,
    ) -> None:
        self.mixture, self.seed = options.mixture(), options.seed
        self.corruption = corruption
        self.losses = {
            strategy: ViewLoss(view, device, options.compiles) for strategy, view in views.items()
        }

    def __call__(self, model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        """Return the loss of a step's sequences (B, N) int64."""
        loss, fed = self.losses[draw_strategy(self.mixture, self.seed, step)], None
        if self.corruption is not None:
            fed = self.corruption(model, tokens, step, loss)
        return loss(model, tokens, step, fed)

    def validate(self, run: TrainingRun, held_out: TokenClips) -> dict[str, Any]:
        """Return the mean held-out loss of the mixture, and that of each strategy and of raster."""
        found = {
            strategy: run.validation_loss(held_out, loss) for strategy, loss in self.losses.items()
        }
        weights = self.mixture.weights
        mean = sum(found[one] * weight for one, weight in weights.items()) / sum(weights.values())
        return {
            "validation_loss": mean,
            "validation_loss_by_strategy": {str(one): loss for one, loss in found.items()},
        }
