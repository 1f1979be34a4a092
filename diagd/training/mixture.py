"""What training lowers: mean negative log-likelihood, in nats, of the tokens to be predicted.

Actions are always given, so only visual tokens count. A sequence is read as a strategy would decode
it (`diagd.decoding.teacher_forcing`); raster order is next-token prediction.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from diagd.backends.native.trained_attention import mask_kernel
from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.strategies.strategy import Raster, Strategy
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.models.attention import Visible
from diagd.tokenizers.shards import TokenClips
from diagd.training.loop import TrainingRun, generator_of
from diagd.training.options import CorruptWith, Mixture, MixtureOptions


class ViewLoss:
    """Mean negative log-likelihood, in nats, of the tokens that a view's lanes predict.

    Args:
        compiled: torch.compile it; on CUDA the mask is FlexAttention's then, which skips the
            blocks that nobody sees, and else the dense one of scaled_dot_product_attention.

    On CPUs with matrix units our own kernels attend where autocast rounds to bfloat16.
    """

    def __init__(self, view: TeacherView, device: torch.device, compiled: bool = False) -> None:
        self.view, lanes = view.to(device), len(view.positions)
        mask = self.view.visible()
        self.visible: Visible = mask
        self.visible_rounded: Visible = mask_kernel(mask, lanes) if device.type == "cpu" else None
        if compiled and device.type == "cuda" and mask is not None:
            self.visible = create_block_mask(self.view.mask_mod(), None, None, lanes, lanes, device)
        self._loss = torch.compile(view_loss) if compiled else view_loss
        self._logits = torch.compile(view_logits) if compiled else view_logits

    def __call__(
        self, model: nn.Module, tokens: Tensor, step: int = 0, fed: Tensor | None = None
    ) -> Tensor:
        """Return the loss of sequences (B, N) int64, others being fed in their place if given."""
        targets = tokens[:, self.view.targets[self.view.readers]]
        return self._loss(model, *self._lanes(tokens if fed is None else fed), targets)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return (B, M, V), what the model says of the M targets in raster order."""
        return self._logits(model, *self._lanes(tokens))

    def _lanes(self, fed: Tensor) -> tuple[Tensor, Tensor, Visible, Tensor]:
        view, visible = self.view, self.visible
        if self.visible_rounded is not None and torch.is_autocast_enabled("cpu"):
            visible = self.visible_rounded
        return fed[:, view.sources], view.positions, visible, view.readers


def view_logits(
    model: nn.Module, inputs: Tensor, positions: Tensor, visible: Visible, readers: Tensor
) -> Tensor:
    """Return the logits (B, M, V) of the lanes to read.

    Args:
        inputs: (B, N) int64 token ids of the lanes.
        positions: (N,) int64.
        visible: who sees whom among the lanes.
        readers: (M,) int64, the lanes to read.
    """
    return model(inputs, positions=positions, visible=visible, logits_to_keep=readers)


def view_loss(
    model: nn.Module,
    inputs: Tensor,
    positions: Tensor,
    visible: Visible,
    readers: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the mean negative log-likelihood of the targets (B, M) int64 (see `view_logits`)."""
    logits = view_logits(model, inputs, positions, visible, readers)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


_CORRUPTION = 2  # tells these generators from that of a step's strategy


class Corruption(NamedTuple):
    """Which tokens of a step are replaced, and by what.

    Attributes:
        share: the largest share of the visual tokens; a step's own is drawn uniformly below it.
        kind: `uniform`, any other visual id; or `samples`, what the model draws in that place from
            the true tokens before it, under the step's strategy, at temperature 1. It may draw the
            true one, and draws nothing for frames that are not learnt.
        seed: of the draws.
        num_ids: visual ids.
        process: number of this process; all have batches of one size.
    """

    share: float
    kind: CorruptWith
    seed: int
    num_ids: int
    process: int = 0

    def __call__(self, model: nn.Module, tokens: Tensor, step: int, loss: ViewLoss) -> Tensor:
        """Return what is fed in place of a step's true sequences (B, N) int64.

        Args:
            loss: of the step's strategy.
        """
        struck, chances = (drawn.to(tokens.device) for drawn in self.draw(step, *tokens.shape))
        if self.kind == "uniform":
            others = 1 + (chances * (self.num_ids - 1)).long()
            wrong = (tokens + others) % self.num_ids
        else:
            targets, wrong = loss.view.targets[loss.view.readers], tokens.clone()
            with torch.no_grad():
                logits = loss.logits(model, tokens)[..., : self.num_ids]
            torch.clear_autocast_cache()  # it holds the weights as cast without a gradient
            sums = logits.float().softmax(-1).cumsum(-1)
            below = sums <= chances[:, targets, None] * sums[..., -1:]
            wrong[:, targets] = below.sum(-1).clamp(max=self.num_ids - 1)
        return torch.where(struck & (tokens < self.num_ids), wrong, tokens)

    def draw(self, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Return which places are struck, (B, N) bool, and a draw from [0, 1) for each."""
        share = (
            self.share * torch.rand((), generator=generator_of(self.seed, step, _CORRUPTION)).item()
        )
        first = self.process * size + 1  # 0 would be the key of the share
        keys = [(self.seed, step, _CORRUPTION, first + row) for row in range(size)]
        drawn = torch.stack([torch.rand(2, length, generator=generator_of(*key)) for key in keys])
        return drawn[:, 0] < share, drawn[:, 1]


_DRAW = 1  # tells the generator of a step's strategy from that of its batch


def draw_strategy(mixture: Mixture, seed: int, step: int) -> Strategy:
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


def views_of(options: MixtureOptions, height: int, width: int) -> dict[Strategy, TeacherView]:
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
        views: dict[Strategy, TeacherView],
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
