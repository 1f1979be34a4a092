"""What the model sees while it decodes a known video, laid out for one forward pass.

Diagonal finetuning (arXiv:2503.14070, section 3.3) replaces the causal mask by one that fits the
order of decoding. Here the mask is not made to fit: the lanes are those of the decoding plan, true
tokens and stand-ins alike, and the mask is the rule of decoding. So one pass over the view returns
the logits that the engine computes step by step while it writes the very same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import RowStart, check_row_start, feeds
from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.visibility import VisibilityRule, check_rule, sees, visibility_mask


@dataclass(frozen=True, eq=False)
class TeacherView:
    """The lanes of all steps of a plan and the prompt before them, in raster order.

    Slots count from the start of the sequence here. Each tensor is (N,) int64, N being the tokens
    fed (all but the last one) and the stand-ins; a stand-in is beside the token it stands in for.

    Attributes:
        sources: the slot whose token id the lane feeds.
        positions: the slot at which it stands; what rotary or learned positions see.
        steps: the step at which it is fed. The prompt is fed token by token before step 0, but for
            its last token, which is fed at step 0.
        targets: the slot of the token that is read from the lane, or -1.
        rule: who may see whom.
    """

    sources: Tensor
    positions: Tensor
    steps: Tensor
    targets: Tensor
    rule: VisibilityRule = "causal"

    @cached_property
    def stand_in(self) -> Tensor:
        """(N,) bool, the lanes that stand in for a token not known yet."""
        return self.sources != self.positions

    @cached_property
    def readers(self) -> Tensor:
        """(M,) int64, the lanes with a target, in the raster order of the targets."""
        return (self.targets >= 0).nonzero()[:, 0]

    @cached_property
    def is_causal(self) -> bool:
        """Whether the mask is the causal one, as in raster order."""
        waits = self.steps.diff()
        in_order = bool((waits >= 0 if self.rule == "causal" else waits > 0).all())
        return in_order and not bool(self.stand_in.any())

    def sees(self, q: Tensor, r: Tensor) -> Tensor:
        """Say whether lane q sees lane r, both int64 that broadcast.

        Under the rule "causal" r > q is never seen.
        """
        return sees(self.positions, self.steps, self.stand_in, q, r, self.rule)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return `sees` as FlexAttention asks for it: (batch, head, q, r) -> bool."""
        columns, rule = (self.positions, self.steps, self.stand_in), self.rule
        return lambda batch, head, q, r: sees(*columns, q, r, rule)

    def visible(self) -> Tensor | None:
        """Return the (N, N) bool mask, True = may attend, or None where it is the causal one."""
        if self.is_causal:
            return None
        return visibility_mask(self.positions, self.steps, self.stand_in, self.rule)

    def to(self, device: torch.device | str) -> "TeacherView":
        """Return the view on a device."""
        columns = self.sources, self.positions, self.steps, self.targets
        return TeacherView(*(column.to(device) for column in columns), rule=self.rule)


@lru_cache(maxsize=32)
def teacher_view(
    schedule: DiagonalSchedule,
    layout: SequenceLayout,
    row_start: RowStart = "temporal",
    prefix_length: int = 0,
    visible: VisibilityRule = "causal",
    learn_context: bool = False,
) -> TeacherView:
    """Lay out the lanes of a schedule for teacher forcing.

    Args:
        layout: the frames to predict, and the context frames before them.
        prefix_length: tokens before the first context frame.
        visible: the rule of who may see whom.
        learn_context: the tokens of the context frames are targets, too, in raster order, but for
            the very first token of a sequence.

    Returns:
        A view on the CPU of a sequence of `prefix_length + layout.context_slots +
        layout.num_slots` tokens.

    Raises:
        ValueError: an unknown row start or rule, or a prompt where the layout has none or the
            reverse.
    """
    check_row_start(row_start)
    check_rule(visible)
    length = prefix_length + layout.context_slots
    if layout.has_prompt != (length > 0):
        raise ValueError(f"has_prompt is {layout.has_prompt}, and the prompt has {length} tokens")
    learnt: set[int] = set()
    if learn_context:
        places = range(layout.grid.tokens_per_frame)
        starts = [layout.slot_of(t, 0, 0) for t in range(-layout.context_frames, 0)]
        learnt = {length + start + place for start in starts for place in places}
    lanes = [
        (slot, slot - length + 1, slot, slot + 1 if slot + 1 in learnt else -1)
        for slot in range(length - 1)
    ]
    for step, position, source, target in feeds(schedule, layout, row_start):
        if step < schedule.num_steps:
            written = -1 if target is None else length + layout.slot_of(*target)
            lanes.append((length + position, step, length + source, written))
    columns = torch.tensor(sorted(lanes), dtype=torch.int64).T.contiguous()
    positions, steps, sources, targets = columns
    return TeacherView(sources, positions, steps, targets, visible)
