"""Wrong tokens as data of training: what is fed holds errors, what is asked for stays true.

A decoded token may be an odd one, and all that follow are conditioned on it; a model that was
trained on true tokens alone has never met that. Here a share of the visual tokens is replaced
before they are fed, and targets and actions stay as they are. What is replaced, and by what, is a
function of seed, step and the number of the sequence in the step's batch, so neither a kill nor the
number of processes changes it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from diagd.training.losses import ViewLoss
from diagd.training.options import CorruptWith
from diagd.training.sequences import generator_of

_DRAW = 2  # tells these generators from that of a step's strategy


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
        share = self.share * torch.rand((), generator=generator_of(self.seed, step, _DRAW)).item()
        first = self.process * size + 1  # 0 would be the key of the share
        keys = [(self.seed, step, _DRAW, first + row) for row in range(size)]
        drawn = torch.stack([torch.rand(2, length, generator=generator_of(*key)) for key in keys])
        return drawn[:, 0] < share, drawn[:, 1]
