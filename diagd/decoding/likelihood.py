"""What a strategy costs a model without generating anything: the likelihood of true videos.

The negative log-likelihood of a clip under the lanes and the visibility of a schedule, minus that
under raster order, is the teacher-forced gap: the price of seeing less, by frame, row and column.
A clip is read once for it, and it tells strategies apart that no eye could.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from diagd.decoding.inputs import check_ids
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.runner import CausalModel
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.diagonal import Scheduled
from diagd.decoding.strategies.strategy import Strategy
from diagd.decoding.teacher_forcing import TeacherView, teacher_view

LANES = 512  # of one forward, so that neither mask nor logits grow with the square of a clip
Sees = Callable[[Tensor, Tensor], Tensor]  # lanes q, r -> whether q sees r


def strategy_nll(
    model: CausalModel,
    tokens: Tensor,
    actions: Tensor | None,
    strategy: Strategy,
    context_frames: int = 1,
    *,
    prefix: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Return what each token of a clip costs while it is decoded by a strategy with a schedule.

    A separator that ends rows is priced like any other token, with stand-ins beside it; decoding
    knows it beforehand.

    Args:
        tokens: (B, context_frames + T, height, width) int64 true frames.
        actions: (B, context_frames + T, n) int64 ids of the model, actions[:, t] standing before
            frame t; those of the first frame of all are not used. None where there are none.
        context_frames: frames that are given; only the T later ones are counted.
        prefix: (B, P) int64, what stands before the first frame.
        context: cross-attention input for models that have one.

    Returns:
        (B, T, height, width) float32, nats.

    Raises:
        ValueError: shapes that do not fit the strategy or each other, foreign ids, a strategy
            without a schedule, or a clip too long.
    """
    if not isinstance(strategy, Scheduled):
        raise ValueError(f"strategy must have a schedule, got {strategy}")
    if tokens.ndim != 4 or tokens.shape[1] <= context_frames:
        raise ValueError(
            "tokens must be of shape (batch, frames, height, width) with more than "
            f"context_frames={context_frames} frames, got {tuple(tokens.shape)}"
        )
    batch_size, num_frames, height, width = tokens.shape
    grid = TokenGrid(num_frames - context_frames, height, width)
    if actions is None:
        actions = tokens.new_empty(batch_size, num_frames, 0)
    if actions.ndim != 3 or actions.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"actions must be of shape {(batch_size, num_frames, 'n')}, got {tuple(actions.shape)}"
        )
    prefix = tokens.new_empty(batch_size, 0) if prefix is None else prefix
    if prefix.ndim != 2 or len(prefix) != batch_size:
        raise ValueError(f"prefix must be of shape ({batch_size}, P), got {tuple(prefix.shape)}")
    check_ids(tokens, model.vocab_size, "tokens")
    check_ids(actions[:, int(context_frames > 0) :], model.num_embeddings, "actions")
    check_ids(prefix, model.num_embeddings, "prefix")
    num_actions = actions.shape[2]
    sequence = torch.cat([actions, tokens.flatten(2)], dim=2).flatten(1)
    if context_frames:
        sequence = sequence[:, num_actions:]
    has_prompt = context_frames > 0 or prefix.shape[1] > 0
    layout = SequenceLayout(grid, num_actions, context_frames, has_prompt)
    view = teacher_view(strategy.schedule(grid), layout, strategy.row_start, prefix.shape[1])
    nll = view_nll(model, torch.cat([prefix, sequence], dim=1), view, context=context)
    return nll.view(batch_size, grid.num_frames, height, width)


def gap_to_raster(nll: Tensor, raster: Tensor) -> dict[str, float | None]:
    """Return the mean cost of clips, how far it is above raster's, and how sure that is.

    Args:
        nll, raster: (clips, ...) nats a token of the same clips.

    Returns:
        `nll` and `gap`, both means, and `gap_error`, the standard error of the gap over clips;
        None for one clip, which cannot tell.
    """
    by_clip = (nll - raster).reshape(len(nll), -1).mean(1)
    error = by_clip.std().item() / math.sqrt(len(by_clip)) if len(by_clip) > 1 else None
    return {"nll": nll.mean().item(), "gap": by_clip.mean().item(), "gap_error": error}


def spell_error(error: float | None) -> str:
    """Write a standard error for a table."""
    return "-" if error is None else f"{error:.4f}"


@torch.inference_mode()
def view_nll(
    model: CausalModel,
    sequence: Tensor,
    view: TeacherView,
    sees: Sees | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Return what each target of a view costs.

    The lanes are fed in raster order into a cache with a slot for each, so many at a time; what a
    lane sees stands before it, so the split changes nothing.

    Args:
        sequence: (B, N) int64, the tokens of the slots that the view speaks of.
        sees: another rule than the view's own, for studies of the rule; never true for r > q.

    Returns:
        (B, targets) float32, nats, the targets in raster order.

    Raises:
        ValueError: a sequence that the model cannot hold.
    """
    if sequence.shape[1] - 1 > model.max_positions:
        raise ValueError(
            f"the model holds {model.max_positions} positions, "
            f"the clip takes {sequence.shape[1] - 1}"
        )
    view, sequence = view.to(model.device), sequence.to(model.device)
    sees = view.sees if sees is None else sees
    num_lanes = len(view.positions)
    cache = model.make_cache(sequence.shape[0], num_lanes + 1, context)
    lanes = torch.arange(num_lanes, device=model.device)
    costs: list[Tensor] = []
    for start in range(0, num_lanes, LANES):
        part = lanes[start : start + LANES]
        visible = sees(part[:, None], lanes[None, : start + len(part)])
        logits = model.forward(
            sequence[:, view.sources[part]], view.positions[part], part, visible, cache
        )
        targets = view.targets[part]
        reads = targets >= 0
        costs.append(
            functional.cross_entropy(
                logits[:, reads].movedim(1, -1).float(),
                sequence[:, targets[reads]],
                reduction="none",
            )
        )
    return torch.cat(costs, dim=1)
