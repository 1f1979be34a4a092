"""What a draw does to the draft token it was to confirm.

- `keep_within`: every draw of a place uses that place's noise g. A draft stays where
  p(draft) * exp(g(draft)) is at least p(draw) * exp(g(draw)) / f (greedy: without g): had the model
  given the draft f times its probability, raster would have drawn it.
- `couple`: a draft x drawn from q is kept with probability min(1, p(x) / q(x)), else replaced by a
  draw from max(0, p - q). The video has the model's distribution, not raster's tokens.

A draft that was not drawn has all of q's mass. Noise of `couple` is bound to the step as well.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diagd.decoding.plan import Lanes
from diagd.decoding.sampling import gumbel_noise, if_any_best, lowest_id_of, truncated_logits
from diagd.decoding.stream import Stream
from diagd.decoding.workspace import Step

_FRAMES = 4096  # the noise of step n is that of frame n * _FRAMES + frame


def keep_within(scores: Tensor, drafts: Tensor, tolerance: float) -> Tensor:
    """Return the best ids, or the drafts where their score is within log(tolerance) of the best.

    Args:
        scores: (B, L, V) float32, log p + noise. drafts: (B, L) int64; out of [0, V) never stays.

    Returns:
        (B, L) int64.
    """
    best = scores.amax(-1)
    known = (drafts >= 0) & (drafts < scores.shape[-1])
    score = scores.gather(-1, torch.where(known, drafts, 0)[..., None])[..., 0]
    stays = known & (score >= best - math.log(tolerance))
    return torch.where(stays, drafts, lowest_id_of(best, scores))


def couple(
    target: Tensor, source: Tensor, drafts: Tensor, seeds: Tensor, lane: Lanes, afresh: bool
) -> Tensor:
    """Turn drafts drawn from `source` into draws from `target`, changing as few as possible.

    Args:
        target, source: (B, L, V) float32 probabilities; a source of zeros stands for a draft that
            was not drawn.
        drafts: (B, L) int64; out of [0, V) never stays.
        seeds: (B,) int64.
        afresh: draw what follows the first change without regard to its draft.

    Returns:
        (B, L) int64.
    """
    size = target.shape[-1]
    known = (drafts >= 0) & (drafts < size)
    ids = torch.where(known, drafts, 0)[..., None]
    certain = torch.zeros_like(source).scatter_(-1, ids, 1.0)
    source = torch.where(source.sum(-1, keepdim=True) > 0, source, certain)
    frames = lane.frames + (lane.steps + 1) * _FRAMES
    noise = gumbel_noise(seeds, frames, lane.rows, lane.columns, 0, size + 1)
    uniform = torch.exp(-torch.exp(-noise[..., size]))
    keep = known & (uniform * source.gather(-1, ids)[..., 0] < target.gather(-1, ids)[..., 0])
    after = (~keep).cumsum(-1) - (~keep).long() > 0 if afresh else torch.zeros_like(keep)
    residual = (target - source).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)  # uniform was 1
    weights = torch.where(after[..., None], target, residual)
    drawn = (weights.log() + noise[..., :size]).argmax(-1)
    return torch.where(keep & ~after, drafts, drawn)


@dataclass(frozen=True)
class KeepWithin:
    """The rule of `Tolerant`: `keep_within`."""

    tolerance: float

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, high = step.ranges.low, step.ranges.high
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        if step.sampling.temperature > 0:
            places = lane.frames, lane.rows, lane.columns
            scores = scores + gumbel_noise(step.space.seeds, *places, low, high)
        drafts = step.space.tokens[:, lane.outputs] - low
        return if_any_best(keep_within(scores, drafts, self.tolerance) + low, scores.amax(-1))


class Coupling:
    """The rule of `SpeculativeJacobi`: `couple`; it remembers what drafts were drawn from."""

    def __init__(self, stream: Stream, afresh: bool) -> None:
        self.afresh = afresh
        shape = *stream.tokens.shape, stream.ranges.high - stream.ranges.low
        self.sources = torch.zeros(shape, device=stream.tokens.device)  # (B, slots, V)

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, space = step.ranges.low, step.space
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        drafts = space.tokens[:, lane.outputs] - low
        target, source = scores.softmax(-1), self.sources[:, lane.outputs]
        self.sources.index_copy_(1, lane.outputs, target)
        drawn = couple(target, source, drafts, space.seeds, lane, self.afresh) + low
        return if_any_best(drawn, scores.amax(-1))
