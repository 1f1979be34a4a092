"""Training under a mixture of strategies: each step's loss is that of a strategy drawn for it.

The loss is the mean negative log-likelihood, in nats, of visual tokens; actions are given.
"""

from bisect import bisect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from diagd.backends.native.trained_attention import mask_kernel
from diagd.backends.replay import compile_or_refuse
from diagd.decoding.schedule import DiagonalSchedule, SequenceLayout, TokenGrid, check_learnt
from diagd.decoding.strategies.table import Raster, Strategy
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.models.attention import Attend, attend, attend_in_blocks, mask_in_parts
from diagd.models.config import ModelConfig
from diagd.models.transformer import Attends, shape_of
from diagd.training.options import CorruptWith, RunOptions
from diagd.training.sequences import generator_of
from diagd.training.setup import choose_precision

_DRAW, _CORRUPTION = 1, 2  # distinguish a step's random generators


class ViewLoss:
    """Mean negative log-likelihood, in nats, of the tokens that a view's lanes predict.

    The mask is the dense one of scaled_dot_product_attention, in parts on CPUs; if `compiled`, on
    CUDA, that of FlexAttention, which skips fully masked blocks. On CPUs with matrix units our own
    kernels attend if autocast rounds to bfloat16.
    """

    def __init__(
        self,
        view: TeacherView,
        device: torch.device,
        compiled: bool = False,
        sliding_window: int = 0,
        stand_in: int | None = None,
    ) -> None:
        self.stand_in = stand_in
        self.view = view.to(device)
        whole, rounded = _attend_under(self.view, None, compiled)
        near, near_rounded = whole, rounded
        if sliding_window:
            near, near_rounded = _attend_under(self.view, sliding_window, compiled)
        self.attends, self.rounded = (whole, near), None
        if rounded is not None and near_rounded is not None:
            self.rounded = rounded, near_rounded
        advice = "train with --no-compile"
        self._loss = compile_or_refuse(view_loss, advice) if compiled else view_loss
        self._logits = compile_or_refuse(view_logits, advice) if compiled else view_logits

    def __call__(self, model: nn.Module, tokens: Tensor, fed: Tensor | None = None) -> Tensor:
        """Return the loss of sequences (B, N) int64; `fed` are fed in their place if given."""
        targets = tokens[:, self.view.targets[self.view.readers]]
        return self._loss(model, *self._lanes(tokens if fed is None else fed), targets)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return (B, M, V), the model's logits for the M targets in raster order."""
        return self._logits(model, *self._lanes(tokens))

    def _lanes(self, fed: Tensor) -> tuple[Tensor, Tensor, Attends, Tensor]:
        is_rounded = self.rounded is not None and torch.is_autocast_enabled("cpu")
        attends = self.rounded if self.rounded is not None and is_rounded else self.attends
        ids = self.view.fed(fed, self.stand_in)
        return ids, self.view.positions, attends, self.view.readers


def _attend_under(
    view: TeacherView, window: int | None, compiled: bool
) -> tuple[Attend, Attend | None]:
    """Return attention under a view's mask on its device, by our kernels if possible, or None."""
    mask, device, lanes = view.visible(window), view.positions.device, len(view.positions)
    if device.type == "cpu":
        plain = partial(attend, visible=None) if mask is None else mask_in_parts(mask)
        return plain, mask_kernel(mask, lanes)
    if compiled and mask is not None:
        blocks = create_block_mask(view.mask_mod(window), None, None, lanes, lanes, device)
        return partial(attend_in_blocks, block_mask=blocks), None
    return partial(attend, visible=mask), None


def view_logits(
    model: nn.Module, inputs: Tensor, positions: Tensor, attends: Attends, readers: Tensor
) -> Tensor:
    """Run token ids (B, N) at positions (N,); return logits (B, M, V) of the M readers."""
    return model(inputs, positions=positions, attends=attends, logits_to_keep=readers)


def view_loss(
    model: nn.Module,
    inputs: Tensor,
    positions: Tensor,
    attends: Attends,
    readers: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the mean negative log-likelihood of the readers' targets (B, M)."""
    logits = view_logits(model, inputs, positions, attends, readers)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class ImageLoss:
    """The loss of images behind prompts: a `ViewLoss` for each length of these."""

    def __init__(self, loss_of: Callable[[int], ViewLoss], num_tokens: int) -> None:
        self._of, self._num_tokens = lru_cache(8)(loss_of), num_tokens

    def __call__(self, model: nn.Module, tokens: Tensor, fed: Tensor | None = None) -> Tensor:
        return self._of(tokens.shape[1] - self._num_tokens)(model, tokens, fed)


class Corruption(NamedTuple):
    """A rule to replace some of a step's input tokens.

    The kind is `uniform`, any other visual id; or `samples`, drawn by the model in that place from
    the true tokens before it, under the step's strategy, at temperature 1. A sample may equal the
    true token; frames that are not learned are never replaced.
    """

    share: float  # maximum share of the visual tokens; each step draws its share uniformly below it
    kind: CorruptWith
    seed: int
    num_ids: int  # number of visual ids
    process: int = 0  # index of the process; all have batches of one size

    def __call__(self, model: nn.Module, tokens: Tensor, step: int, loss: ViewLoss) -> Tensor:
        """Return the input in place of a step's true sequences (B, N), under its loss."""
        struck, chances = (drawn.to(tokens.device) for drawn in self.draw(step, *tokens.shape))
        if self.kind == "uniform":
            others = 1 + (chances * (self.num_ids - 1)).long()
            wrong = (tokens + others) % self.num_ids
        else:
            targets, wrong = loss.view.targets[loss.view.readers], tokens.clone()
            with torch.no_grad():
                logits = loss.logits(model, tokens)[..., : self.num_ids]
            torch.clear_autocast_cache()  # it holds weights cast without gradients
            sums = logits.float().softmax(-1).cumsum(-1)
            below = sums <= chances[:, targets, None] * sums[..., -1:]
            wrong[:, targets] = below.sum(-1).clamp(max=self.num_ids - 1)
        return torch.where(struck & (tokens < self.num_ids), wrong, tokens)

    def draw(self, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw the replaced places, (B, N) bool, and a number in [0, 1) for each."""
        key = self.seed, step, _CORRUPTION
        share = self.share * torch.rand((), generator=generator_of(*key)).item()
        first = self.process * size + 1  # 0 would be the key of the share
        generators = (generator_of(*key, first + row) for row in range(size))
        drawn = torch.stack([torch.rand(2, length, generator=one) for one in generators])
        return drawn[:, 0] < share, drawn[:, 1]


def draw_strategy(mixture: Mapping[Strategy, float], seed: int, step: int) -> Strategy:
    """Draw the strategy of a step."""
    ends = list(accumulate(mixture.values()))
    place = torch.rand((), generator=generator_of(seed, step, _DRAW)).item() * ends[-1]
    return list(mixture)[bisect(ends, place)]


class MixtureLoss:
    """The loss of each step under the strategy drawn for it.

    Inputs are corrupted as the options say, except in validation. Nothing precedes the first
    frame, which is in raster order under every strategy, and learned with `context_frames=0`.
    """

    def __init__(
        self,
        options: RunOptions,
        config: ModelConfig,
        device: torch.device,
        process: int = 0,
        row_ends: bool = False,
    ) -> None:
        self.mixture, self.seed = options.mixture, options.seed
        share, kind, num_ids = options.corrupt, options.corrupt_with, config.image_vocab_size
        self.corruption = Corruption(share, kind, self.seed, num_ids, process) if share else None
        context_frames = max(1, options.context_frames)
        shape = config.grid_height, config.grid_width
        grid = TokenGrid(options.frames - context_frames, *shape)
        layout = SequenceLayout(grid, 1, context_frames)
        if is_image := options.is_of_images:
            layout = SequenceLayout(grid := TokenGrid(1, *shape))
        # on a CPU that computes in float32 it is not faster (dev/LOG.md)
        pays = device.type == "cuda" or choose_precision(options.precision) == "bf16"
        compiles = options.compiles and not is_image  # anew for each length of a prompt
        self.is_compiled, stand_in = compiles and pays, shape_of(config, device).stand_in
        learns = options.context_frames == 0

        def loss_of(schedule: DiagonalSchedule, length: int = 0) -> ViewLoss:
            view = teacher_view(schedule, layout, length, learns, options.window, row_ends)
            return ViewLoss(view, device, self.is_compiled, config.sliding_window, stand_in)

        self.losses: dict[Strategy, ViewLoss | ImageLoss] = {}
        for strategy in dict.fromkeys((*self.mixture, Raster())):  # raster for comparison
            check_learnt(schedule := strategy.schedule(grid), stand_in)
            of_length, size = partial(loss_of, schedule), grid.tokens_per_frame
            self.losses[strategy] = ImageLoss(of_length, size) if is_image else of_length()

    def __call__(self, model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        loss, fed = self.losses[draw_strategy(self.mixture, self.seed, step)], None
        if self.corruption is not None and isinstance(loss, ViewLoss):
            fed = self.corruption(model, tokens, step, loss)
        return loss(model, tokens, fed)
