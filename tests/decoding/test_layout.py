"""`diagd/decoding/schedule.py`: slots are the places of a sequence written out one by one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from diagd.decoding.schedule import SequenceLayout


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    height = draw(st.integers(1, 4))
    width = draw(st.integers(1, 5).filter(lambda width: width != height))
    grid = diagd.TokenGrid(draw(st.integers(1, 3)), height, width)
    return SequenceLayout(grid, draw(st.integers(0, 3)), draw(st.integers(0, 3)))


def write_out(layout: SequenceLayout) -> list[tuple]:
    """Return what stands at each slot, from the first context frame on."""
    sequence = []
    for t in range(-layout.context_frames, layout.grid.num_frames):
        if t > -layout.context_frames or layout.context_frames == 0:
            sequence += [("action", t, n) for n in range(layout.num_action_tokens)]
        for i in range(layout.grid.height):
            sequence += [("visual", t, i, j) for j in range(layout.grid.width)]
    return sequence


@given(layouts())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_slots_follow_raster_order(layout):
    sequence = write_out(layout)
    generated = layout.grid.num_frames * (layout.grid.tokens_per_frame + layout.num_action_tokens)
    context = len(sequence) - generated
    assert layout.num_slots == generated
    assert layout.context_slots == context
    for index, (kind, t, *place) in enumerate(sequence):
        first = layout.slot_of(t, 0, 0) - layout.num_action_tokens
        slot = first + place[0] if kind == "action" else layout.slot_of(t, *place)
        assert slot == index - context


@pytest.mark.parametrize("name", ["num_action_tokens", "context_frames"])
def test_counts_below_zero_are_errors(name):
    counts = {"num_action_tokens": 0, "context_frames": 0, name: -1}
    with pytest.raises(ValueError, match=rf"^{name} must be 0 or more, got -1$"):
        SequenceLayout(
            diagd.TokenGrid(2, 3, 5), counts["num_action_tokens"], counts["context_frames"]
        )
    wrong: dict[str, Any] = {name: 1.5}
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number, got 1\.5$"):
        SequenceLayout(diagd.TokenGrid(2, 3, 5), **wrong)


def test_nothing_predicts_the_first_token_of_an_empty_sequence():
    grid = diagd.TokenGrid(2, 3, 5)
    message = "^prompt must not be empty if no conditioning tokens precede the frame$"
    with pytest.raises(ValueError, match=message):
        SequenceLayout(grid, has_prompt=False)
    assert SequenceLayout(grid, 2, has_prompt=False).num_slots == 34
