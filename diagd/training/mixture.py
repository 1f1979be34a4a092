"""Schedules as data of training: each step is taken under one strategy of a weighted mixture.

    raster                     next-token prediction alone
    raster k=1:2 k=1,d=14      half of the steps under k=1, a quarter under each of the others

The draw of a step is a function of seed and step alone, so neither a kill nor the number of
processes changes it. What a strategy's lanes are and who sees whom is laid out once, before the
first step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.diagonal import Raster, Scheduled
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.tokenizers.shards import TokenClips
from diagd.training.corruption import Corruption, CorruptWith, check_corruption
from diagd.training.loop import TrainingRun
from diagd.training.losses import ViewLoss
from diagd.training.options import LoopOptions
from diagd.training.sequences import generator_of

_DRAW = 1  # tells the generator of a step's strategy from that of its batch


@dataclass(frozen=True)
class Mixture:
    """Strategies and how often each is drawn.

    Attributes:
        weights: strategies with a schedule, and a number above 0 for each.
    """

    weights: dict[Scheduled, float]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Mixture":
        """Read names, of which a text may hold several with spaces between, each `NAME[:WEIGHT]`.

        Raises:
            ValueError: no name, one that is none, is named twice or has no schedule, or a weight
                that is no number above 0.
        """
        weights: dict[Scheduled, float] = {}
        for word in (word for text in texts for word in text.split()):
            name, _, weight = word.partition(":")
            strategy = parse_strategy(name)
            if not isinstance(strategy, Scheduled):
                raise ValueError(
                    f"strategies must have a schedule (raster, k=..., zipar=...), got {name!r}"
                )
            if strategy in weights:
                raise ValueError(f"strategies must be named once each, got {strategy} twice")
            weights[strategy] = _weight(weight, word) if ":" in word else 1.0
        if not weights:
            raise ValueError("strategies must name at least one, such as k=1")
        return cls(weights)

    def __str__(self) -> str:
        """Return the spelling that `parse` reads."""
        return " ".join(
            f"{strategy}" + (f":{weight:g}" if weight != 1 else "")
            for strategy, weight in self.weights.items()
        )

    def draw(self, seed: int, step: int) -> Scheduled:
        """Return the strategy of a step."""
        ends = list(accumulate(self.weights.values()))
        place = torch.rand((), generator=generator_of(seed, step, _DRAW)).item() * ends[-1]
        return next(
            strategy for strategy, end in zip(self.weights, ends, strict=True) if place < end
        )


def _weight(text: str, word: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"a strategy's weight must be a number above 0, as in k=1:2, got {word!r}")
    return weight


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(LoopOptions):
    """What a training run is told of schedules."""

    strategies: tuple[str, ...]  # drawn for each step; with weights: raster k=1:2 k=1,d=14
    context_frames: int  # frames at the start that are given, in raster order, and not learnt
    # frames that may be seen, the one under way included, as in a stream that has outgrown its
    # context; longer sequences are read in one go all the same. Default: all of a sequence
    window: int | None = None
    corrupt: float = 0.0  # feed wrong tokens: a share of them, drawn for each step from 0 to this
    # wrong tokens: any (uniform), or what the model itself would draw in their place (samples)
    corrupt_with: CorruptWith = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mixture()
        check_corruption(self.corrupt, self.corrupt_with)
        if not 0 <= self.context_frames < self.frames:
            raise ValueError(
                f"context_frames must be in [0, frames={self.frames}), got {self.context_frames}"
            )

        least = max(2, self.context_frames)
        if self.window is not None and not least <= self.window < self.frames:
            raise ValueError(
                f"window must be in [{least}, frames={self.frames}): what has more frames outgrows "
                f"it; got {self.window}"
            )

    @property
    def frames_held(self) -> int:
        """Frames that a model's context has to hold."""
        return self.window or self.frames

    def mixture(self) -> Mixture:
        """Return the strategies and their weights."""
        return Mixture.parse(self.strategies)

    def corruption(self, num_ids: int, process: int = 0) -> Corruption | None:
        """Return how what is fed becomes wrong, if it does.

        Args:
            num_ids: visual ids.
            process: number of the process that asks.
        """
        if not self.corrupt:
            return None
        return Corruption(self.corrupt, self.corrupt_with, self.seed, num_ids, process)

    def purpose(self) -> dict[str, object]:
        """Return what a run is for; two runs that differ in it are not the same one."""
        wrong = {"corrupt": self.corrupt, "corrupt_with": self.corrupt_with} if self.corrupt else {}
        return {
            "strategies": str(self.mixture()),
            "context_frames": self.context_frames,
            "frames": self.frames,
            **({"window": self.window} if self.window else {}),
            **wrong,
        }

    def views(self, height: int, width: int) -> dict[Scheduled, TeacherView]:
        """Lay out the strategies, and raster to compare them with, on frames of a size.

        Nothing stands before the first frame, which is therefore in raster order under every
        strategy; with `context_frames=0` it is learnt.

        Raises:
            ValueError: lags that do not fit the grid.
        """
        context_frames = max(1, self.context_frames)
        grid = TokenGrid(self.frames - context_frames, height, width)
        layout = SequenceLayout(grid, 1, context_frames)
        return {
            strategy: teacher_view(
                strategy.schedule(grid),
                layout,
                strategy.row_start,
                learn_context=self.context_frames == 0,
                window=self.window,
            )
            for strategy in (*self.mixture().weights, Raster())
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
        loss, fed = self.losses[self.mixture.draw(self.seed, step)], None
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
