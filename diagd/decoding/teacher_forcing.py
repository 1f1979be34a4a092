"""A model's view while it decodes a known video, laid out for one forward pass.

Diagonal finetuning (arXiv:2503.14070, section 3.3) derives a mask from the order of decoding. Here
the lanes (with stand-ins) and the mask are those of decoding, so one pass returns the logits that
the engine computes step by step for the same tokens, beyond a full context as well.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diagd.decoding.model import CausalModel, check_ids
from diagd.decoding.schedule import (
    STAND_IN,
    DiagonalSchedule,
    FrameFormat,
    SequenceLayout,
    TokenGrid,
    check_learnt,
    feeds,
)
from diagd.decoding.step import steered
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.decoding.visibility import NEVER, Seen, visible

LANES = 512  # per forward pass: limits the size of mask and logits
Sees = Callable[[Tensor, Tensor], Tensor]  # lanes q, r -> whether q sees r
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TeacherView:
    """The lanes of all steps of a plan and of the prompt before it, in raster order.

    Slots count from the start of the sequence. Each tensor is (N,) int64: a lane for each token
    fed, which is all but the last, and one for each stand-in, next to the token it replaces. The
    prompt is fed token by token before step 0, its last token at step 0.
    """

    sources: Tensor  # the slot whose token id the lane feeds; STAND_IN: that of a learnt stand-in
    positions: Tensor  # its slot; input of rotary or learned positions
    steps: Tensor  # the step at which it is fed
    targets: Tensor  # the slot of the token predicted from the lane, or -1
    leaves_at: Tensor  # the first step whose lanes do not see it, as its frame has left; or NEVER

    @cached_property
    def stand_in(self) -> Tensor:
        """(N,) bool, the lanes that stand in for a token fed later."""
        return functional.pad(self.positions.diff() == 0, (0, 1))

    @cached_property
    def fed_at(self) -> Tensor:
        """(N,) int64, the first step whose lanes may see the lane: never, for a stand-in."""
        return torch.where(self.stand_in, NEVER, self.steps)

    @cached_property
    def readers(self) -> Tensor:
        """(M,) int64, the lanes with a target, in the raster order of the targets."""
        return (self.targets >= 0).nonzero()[:, 0]

    def sees(self, q: Tensor, r: Tensor) -> Tensor:
        """Return whether lane q sees lane r, both int64 that broadcast; never true for r > q."""
        return self.mask_mod()(q, q, q, r)

    def mask_mod(self, window: int | None = None) -> MaskMod:
        """Return `sees` in FlexAttention's form: (batch, head, q, r) -> bool.

        `window`: positions that a layer may see, the lane's own included (None: all).
        """
        positions, steps = self.positions, self.steps
        fed_at, leaves_at = self.fed_at, self.leaves_at

        def mask(batch: Tensor, head: Tensor, q: Tensor, r: Tensor) -> Tensor:
            seen = visible(positions[q], steps[q], positions[r], fed_at[r], q == r)
            seen = seen & (steps[q] < leaves_at[r])
            return seen if window is None else seen & (positions[q] - positions[r] < window)

        return mask

    def fed(self, sequence: Tensor, stand_in: int | None) -> Tensor:
        """Return the ids (B, N) that lanes feed of a sequence; `stand_in` is the learnt one's."""
        if stand_in is None:
            return sequence[:, self.sources]
        return sequence[:, self.sources.clamp(min=0)].masked_fill(self.sources < 0, stand_in)

    def visible(self, window: int | None = None) -> Tensor | None:
        """Return the (N, N) bool mask, True = may attend, or None if it is the causal one."""
        in_order = (self.steps.diff() >= 0).all() and not self.stand_in.any()
        if window is None and in_order and (self.leaves_at > self.steps.max()).all():
            return None
        lanes = torch.arange(len(self.positions), device=self.positions.device)
        column = lanes[:, None]
        return self.mask_mod(window)(column, column, column, lanes)

    def to(self, device: torch.device | str) -> "TeacherView":
        return TeacherView(*(getattr(self, one.name).to(device) for one in fields(self)))


@lru_cache(maxsize=32)
def teacher_view(
    schedule: DiagonalSchedule,
    layout: SequenceLayout,
    prefix_length: int = 0,
    learn_context: bool = False,
    window: int | None = None,
    known_row_ends: bool = False,
) -> TeacherView:
    """Lay out the lanes of a schedule for teacher forcing, on the CPU.

    Args:
        layout: the frames to predict, and the context frames before them; has_prompt is
        ignored.
        prefix_length: tokens before the first context frame.
        learn_context: context frames are targets as well, in raster order, except for the very
            first token.
        window: frames that the stream's context holds, including the current one, at least 2
            and the context frames; None: all. Those that fit are decoded by the schedule, later
            ones one by one, each replacing the oldest, as in a stream.
        known_row_ends: as in `make_plan`; then the last token of each row is not a target.
    """
    length, num_frames = prefix_length + layout.context_slots, layout.grid.num_frames
    given = layout.context_frames
    starts = [t * layout.slots_per_frame for t in range(-given, 0)] if learn_context else []
    learnt = {length + start + slot for start in starts for slot in layout.token_slots}
    lanes = [
        (slot, slot - length + 1, slot, slot + 1 if slot + 1 in learnt else -1)
        for slot in range(length - 1)
    ]
    fitting = num_frames if window is None else min(max(1, window - given), num_frames)
    begins: list[int] = []  # step at which each frame's part begins
    now = 0
    for size in (fitting, *[1] * (num_frames - fitting)):
        grid, done = replace(layout.grid, num_frames=size), len(begins)
        base = length + done * layout.slots_per_frame
        begun = replace(layout, grid=grid, context_frames=given + done, has_prompt=base > 0)
        part = replace(schedule, grid=grid)
        for step, position, source, target in feeds(part, begun, known_row_ends):
            if step < part.num_steps:
                is_known = known_row_ends and target is not None and target[2] == grid.width - 1
                written = -1 if target is None or is_known else base + begun.slot_of(*target)
                fed = source if source == STAND_IN else base + source
                lanes.append((base + position, now + step, fed, written))
        begins += [now] * size
        now += part.num_steps
    columns = torch.tensor(sorted(lanes), dtype=torch.int64).T.contiguous()
    positions, steps, sources, targets = columns
    leaves_at = torch.full_like(positions, NEVER)
    if window is not None:
        # frames counted from the first context frame, which has no actions before it
        actions = layout.num_leading if given else 0
        frames = (positions - prefix_length + actions) // layout.slots_per_frame
        for newest in range(window - given, num_frames):
            oldest = given + newest - window
            leaves_at[(frames == oldest) & (positions >= prefix_length)] = begins[newest]
    return TeacherView(sources, positions, steps, targets, leaves_at)


def strategy_nll(
    model: CausalModel,
    tokens: Tensor,
    actions: Tensor | None,
    strategy: Strategy,
    context_frames: int = 1,
    *,
    prefix: Tensor | None = None,
    context: Tensor | None = None,
    row_ends: bool = False,
    num_ids: int | None = None,
    frame: FrameFormat | None = None,
) -> Tensor:
    """Return the cost of each token of a clip, decoded by a strategy with a schedule.

    Args:
        tokens: (B, context_frames + T, height, width) int64 true frames; the last T count.
        actions: (B, context_frames + T, n) int64 ids of the model or None; actions[:, t] precedes
            frame t, and those before the very first frame are ignored.
        prefix: (B, P) int64, tokens before the first frame.
        context: cross-attention input for models that have one.
        row_ends: whether the last token of each row is a known separator, and not a target.
        num_ids: ids that may be sampled are [0, num_ids); default: all.
        frame: format of frames that are more than a grid after their actions.

    Returns:
        (B, T, height, width) float32, nats; without row ends one column less.
    """
    batch_size, num_frames, height, width = tokens.shape
    given = tokens, actions, strategy, context_frames, prefix, frame
    whole, length, view_of = _laid_out(model, *given)
    view_of = partial(view_of, known_row_ends=row_ends)
    if model.scales:
        rows = [model.prompts_of(one, row, batch_size) for row, one in enumerate(whole)]
        extra = whole.shape[1] - length
        views = [[view_of(len(one) - extra) for one in of_row] for of_row in rows]
        costs = [_guided_nll(model, *row, num_ids) for row in zip(rows, views, strict=True)]
        nll = torch.cat(costs)
    else:
        nll = view_nll(model, whole, view_of(length), context=context, num_ids=num_ids)
    return nll.view(batch_size, num_frames - context_frames, height, width - row_ends)


def strategy_loss(
    model: Any,
    tokens: Tensor,
    actions: Tensor | None = None,
    strategy: Strategy | str = "k=1",
    context_frames: int = 1,
    *,
    prefix: Tensor | None = None,
    context: Tensor | None = None,
    frame: FrameFormat | None = None,
) -> Tensor:
    """Return the mean of `strategy_nll`, in nats, with gradients: a loss for finetuning.

    Args:
        model: a `Transformer` or a `HuggingFaceModel`, with or without adapters of peft.
        tokens, actions, strategy, context_frames, prefix, context, frame: as in `strategy_nll`.
    """
    given = tokens, actions, as_strategy(strategy), context_frames, prefix, frame
    whole, length, view_of = _laid_out(model, *given)
    view, whole = view_of(length).to(model.device), whole.to(model.device)
    fed, targets = view.fed(whole, model.shape.stand_in), view.targets[view.readers]
    logits = model.logits(fed, context, view.positions, view.visible())[:, view.readers]
    return _costs(logits, whole[:, targets], None).mean()


def _laid_out(
    model: Any,
    tokens: Tensor,
    actions: Tensor | None,
    strategy: Strategy,
    context_frames: int,
    prefix: Tensor | None,
    frame: FrameFormat | None,
) -> tuple[Tensor, int, Callable[..., TeacherView]]:
    """Return clips as sequences, the length of their prefix, and `teacher_view` for a length."""
    batch_size, num_frames, height, width = tokens.shape
    grid = TokenGrid(num_frames - context_frames, height, width)
    if actions is None:
        actions = tokens.new_empty(batch_size, num_frames, 0)
    prefix = tokens.new_empty(batch_size, 0) if prefix is None else prefix
    check_ids(tokens, model.vocab_size, "tokens")
    check_ids(actions[:, int(context_frames > 0) :], model.num_embeddings, "actions")
    check_ids(prefix, model.num_embeddings, "prefix")
    frame = frame or FrameFormat(height, width, actions.shape[2])
    layout = frame.layout(grid.num_frames, context_frames)
    check_learnt(schedule := strategy.schedule(grid), model.shape.stand_in)
    whole = torch.cat([prefix, in_sequence(layout, actions, tokens)], dim=1)
    return whole, prefix.shape[1], partial(teacher_view, schedule, layout)


def in_sequence(layout: SequenceLayout, actions: Tensor, tokens: Tensor) -> Tensor:
    """Concatenate frames: (B, T, n) and (B, T, height, width) -> (B, N).

    Actions before the first frame are left out if it is a context frame.
    """
    frames = tokens.new_empty(*actions.shape[:2], layout.slots_per_frame)
    frames[..., layout.action_slots] = actions
    frames[..., layout.token_slots] = tokens.flatten(2)
    return frames.flatten(1)[:, layout.num_leading if layout.context_frames else 0 :]


def gap_to_raster(nll: Tensor, raster: Tensor) -> dict[str, float | None]:
    """Return the mean cost of clips, its distance above raster's, and the standard error.

    Both are (clips, ...) nats per token. `gap_error` is over clips, None for one.
    """
    by_clip = (nll - raster).reshape(len(nll), -1).mean(1)
    error = by_clip.std().item() / math.sqrt(len(by_clip)) if len(by_clip) > 1 else None
    return {"nll": nll.mean().item(), "gap": by_clip.mean().item(), "gap_error": error}


@torch.inference_mode()
def view_nll(
    model: CausalModel,
    sequence: Tensor,
    view: TeacherView,
    sees: Sees | None = None,
    context: Tensor | None = None,
    num_ids: int | None = None,
) -> Tensor:
    """Return the cost of each target of a view: (B, targets) float32, nats, in raster order.

    Lanes are fed in raster order, in pieces, into a cache with a slot for each; lanes only see
    earlier ones, so the split changes nothing.

    Args:
        sequence: (B, N) int64, the tokens at the slots of the view.
        sees: another rule than the view's own, for studies; never true for r > q.
        context, num_ids: as in `strategy_nll`.
    """
    parts = _logits(model, sequence, view, sees, context)
    return torch.cat([_costs(logits, true, num_ids) for logits, true in parts], dim=1)


def _costs(logits: Tensor, true: Tensor, num_ids: int | None) -> Tensor:
    scores = logits[..., :num_ids].movedim(1, -1).float()
    return functional.cross_entropy(scores, true, reduction="none")


@torch.inference_mode()
def _guided_nll(
    model: CausalModel, sequences: list[Tensor], views: list[TeacherView], num_ids: int | None
) -> Tensor:
    """Return the costs (1, targets) of a row with unconditional prompts."""
    each, true = list[Tensor](), sequences[0]
    for one, view in zip(sequences, views, strict=True):
        logits, targets = zip(*_logits(model, one[None], view), strict=True)
        each.append(torch.cat(logits, 1))
        true = torch.cat(targets, 1)
    return _costs(steered(torch.cat(each), model.scales), true, num_ids)


def _logits(
    model: CausalModel,
    sequence: Tensor,
    view: TeacherView,
    sees: Sees | None = None,
    context: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits (B, n, V) that predict targets, and these, (B, n), piece by piece."""
    longest, length = model.max_positions, sequence.shape[1] - 1
    if length > longest:
        raise ValueError(f"clip must fit the model's {longest} positions, got {length}")
    view, sequence = view.to(model.device), sequence.to(model.device)
    sees = view.sees if sees is None else sees
    num_lanes = len(view.positions)
    cache = model.make_cache(sequence.shape[0], num_lanes + 1, context)
    ids = view.fed(sequence, model.shape.stand_in)
    lanes = torch.arange(num_lanes, device=model.device)
    for start in range(0, num_lanes, LANES):
        part = lanes[start : start + LANES]
        end = start + len(part)
        visible = sees(part[:, None], lanes[None, :end])
        fed, positions = ids[:, part], view.positions[part]
        seen = Seen.of_mask(visible, positions, view.positions[:end])
        logits = model.forward(fed, positions, part, seen, cache)
        targets = view.targets[part]
        reads = targets >= 0
        yield logits[:, reads], sequence[:, targets[reads]]
