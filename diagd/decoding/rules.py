"""What a draw does to the guess it was to confirm: the rules of parallel decoding.

- `coupled`: every draw of a place uses that place's noise g, so it is the raster draw once the
  prefix is the raster prefix. With tolerance f > 1 a guess stays where p(guess) * exp(g(guess)) is
  at least p(draw) * exp(g(draw)) / f (greedy: without g): had the model given the guess f times its
  probability, raster would have drawn it.
- `sjd`, speculative Jacobi decoding (arXiv:2410.01699): a guess x drawn from q is kept with
  probability min(1, p(x) / q(x)), else replaced by a draw from max(0, p - q); what follows the
  first replacement is drawn afresh. The video has the model's distribution, not raster's tokens.
- `mc-sjd`: as `sjd`, but what follows goes through the same step, a maximal coupling of q and p, so
  guesses change as seldom as they can (arXiv:2510.24211).

A guess that was not drawn has all of q's mass. Noise of the last two is bound to the pass as well.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from diagd.decoding.plan import Lanes
from diagd.decoding.sampling import gumbel_noise

Rule = Literal["coupled", "sjd", "mc-sjd"]
_FRAMES = 4096  # the noise of pass n is that of frame n * _FRAMES + frame


def keep_within(scores: Tensor, guesses: Tensor, tolerance: float) -> Tensor:
    """Return the best ids, or the guesses where their score is within log(tolerance) of the best.

    Args:
        scores: (B, L, V) float32, log p + noise. guesses: (B, L) int64; out of [0, V) never stays.

    Returns:
        (B, L) int64.
    """
    best, drawn = scores.max(-1)
    known = (guesses >= 0) & (guesses < scores.shape[-1])
    score = scores.gather(-1, torch.where(known, guesses, 0)[..., None])[..., 0]
    return torch.where(known & (score >= best - math.log(tolerance)), guesses, drawn)


def couple(
    target: Tensor, source: Tensor, guesses: Tensor, seeds: Tensor, lane: Lanes, afresh: bool
) -> Tensor:
    """Turn guesses drawn from `source` into draws from `target`, changing as few as possible.

    Args:
        target, source: (B, L, V) float32 probabilities; a source of zeros stands for a guess that
            was not drawn.
        guesses: (B, L) int64; out of [0, V) never stays.
        seeds: (B,) int64.
        afresh: draw what follows the first change without regard to its guess.

    Returns:
        (B, L) int64.
    """
    size = target.shape[-1]
    known = (guesses >= 0) & (guesses < size)
    ids = torch.where(known, guesses, 0)[..., None]
    certain = torch.zeros_like(source).scatter_(-1, ids, 1.0)
    source = torch.where(source.sum(-1, keepdim=True) > 0, source, certain)
    frames = lane.frames + (lane.steps + 1) * _FRAMES
    noise = gumbel_noise(seeds, frames, lane.rows, lane.columns, 0, size + 1)
    uniform = torch.exp(-torch.exp(-noise[..., size]))
    keep = known & (uniform * source.gather(-1, ids)[..., 0] < target.gather(-1, ids)[..., 0])
    after = (~keep).cumsum(-1) - (~keep).long() > 0 if afresh else torch.zeros_like(keep)
    residual = (target - source).clamp(min=0)
    weights = torch.where(after[..., None], target, residual)
    drawn = (weights.log() + noise[..., :size]).argmax(-1)
    return torch.where(keep & ~after, guesses, drawn)
