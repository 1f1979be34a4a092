"""`diagd/decoding/visibility.py`: one rule, for a step with a cache and for a whole sequence."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagd.decoding.visibility import NEVER, Seen, visible


@st.composite
def feeds(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw when the true token of each slot is fed, and stand-ins (slot, step) fed before it."""
    fed_at = draw(st.lists(st.integers(-1, 6) | st.just(NEVER), min_size=1, max_size=12))
    stand_ins = [
        (slot, draw(st.integers(-1, min(fed, 6) - 1)))
        for slot, fed in enumerate(fed_at)
        if fed > 0 and draw(st.booleans())
    ]
    return fed_at, stand_ins


def mask_of(lanes: list[tuple[int, int, bool]]) -> torch.Tensor:
    """Apply the rule to a sequence of (slot, step, whether it stands in)."""
    positions, steps, stands_in = (torch.tensor(column) for column in zip(*lanes, strict=True))
    fed_at = torch.where(stands_in, NEVER, steps)
    is_self = torch.eye(len(lanes), dtype=torch.bool)
    return visible(positions[:, None], steps[:, None], positions, fed_at, is_self)


@given(feed=feeds())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_mask_of_a_sequence_and_of_its_steps_is_the_rule_in_words(feed):
    fed_at, stand_ins = feed
    lanes = [(slot, fed, False) for slot, fed in enumerate(fed_at) if fed != NEVER]
    lanes += [(slot, step, True) for slot, step in stand_ins]
    if not lanes:
        return
    mask = mask_of(lanes)
    assert mask.dtype == torch.bool
    for q, (slot_q, fed_q, _) in enumerate(lanes):
        for r, (slot_r, fed_r, is_stand_in) in enumerate(lanes):
            expected = not is_stand_in and slot_r <= slot_q and fed_r <= fed_q
            assert bool(mask[q, r]) == (q == r or expected)
    for step in {fed for _, fed, _ in lanes}:  # one with a cache
        now = [q for q, (_, fed, _) in enumerate(lanes) if fed == step]
        positions = torch.tensor([lanes[q][0] for q in now])
        steps, held = torch.full_like(positions, step), torch.arange(len(fed_at))
        in_cache = Seen(positions, steps, held, torch.tensor(fed_at)).mask()
        for lane, q in enumerate(now):
            # what lies in a slot while the lane looks: the lane's own key, or the true token
            seen = {lanes[r][0] for r in range(len(lanes)) if mask[q, r]}
            assert {slot for slot in range(len(fed_at)) if in_cache[lane, slot]} == seen


def test_a_slot_counts_as_the_position_that_it_holds():
    held, fed_at = torch.tensor([0, 7, 5, 6]), torch.tensor([-1, NEVER, -1, 2])
    visible = Seen(torch.tensor([6, 7]), torch.tensor([2, 3]), held, fed_at).mask()
    assert visible.tolist() == [[True, False, True, True], [True, True, True, True]]


def test_every_lane_looks_from_its_own_step():
    fed_at = torch.tensor([0, 4, 1, 2])
    positions, steps = torch.tensor([2, 3, 3]), torch.tensor([2, 2, 4])
    visible = Seen(positions, steps, torch.arange(4), fed_at).mask()
    assert visible.tolist() == [
        [True, False, True, False],
        [True, False, True, True],
        [True, True, True, True],
    ]
