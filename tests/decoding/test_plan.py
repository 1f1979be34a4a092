"""Plans (`diagd/decoding/schedule.py`): what the engine is told to do, without a model."""

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from diagd.decoding.schedule import (
    MIN_WIDTH,
    SCRATCH,
    DecodePlan,
    RowStart,
    SequenceLayout,
    make_plan,
    padded_width,
)
from diagd.decoding.step import Lanes
from diagd.decoding.visibility import Seen
from tests.decoding.cases import cases

plan_settings = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def plans(draw: st.DrawFn) -> tuple[DecodePlan, SequenceLayout]:
    case = draw(cases())
    layout = SequenceLayout(case.grid, case.num_action_tokens, case.context_frames)
    return make_plan(case.schedule, layout), layout


def steps_of(plan: DecodePlan) -> list[Lanes]:
    return [
        Lanes(*torch.tensor(plan.lanes[start:end]).T)
        for start, end in zip(plan.starts[:-1], plan.starts[1:], strict=True)
    ]


def visual_slots(layout: SequenceLayout) -> dict[int, tuple[int, int, int]]:
    grid = layout.grid
    return {
        layout.slot_of(t, i, j): (t, i, j)
        for t in range(grid.num_frames)
        for i in range(grid.height)
        for j in range(grid.width)
    }


def action_slots(layout: SequenceLayout, t: int) -> range:
    first = t * layout.slots_per_frame
    return range(first, first + layout.num_action_tokens)


@given(plans())
@plan_settings
def test_every_token_is_written_once_at_its_step(drawn):
    plan, layout = drawn
    places = visual_slots(layout)
    written = Counter()
    for step, lanes in enumerate(steps_of(plan)):
        for lane in range(len(lanes.outputs)):
            slot = int(lanes.outputs[lane])
            if slot == SCRATCH:
                continue
            written[slot] += 1
            place = tuple(int(axis[lane]) for axis in (lanes.frames, lanes.rows, lanes.columns))
            assert place == places[slot]
            assert step == plan.order.step_of(*place)
            assert lanes.positions[lane] == slot - 1  # read at the raster predecessor's place
    assert written == Counter(places.keys())


@given(plans())
@plan_settings
def test_every_token_but_the_last_is_fed_once_a_step_after_it_was_written(drawn):
    plan, layout = drawn
    places = visual_slots(layout)
    last = layout.num_slots - 1
    fed = {}
    for step, lanes in enumerate(steps_of(plan)):
        for position, slot, source in zip(lanes.positions, lanes.slots, lanes.inputs, strict=True):
            if slot == position == source:
                assert int(slot) not in fed
                fed[int(slot)] = step
    for slot, place in places.items():
        if slot != last:
            assert fed.pop(slot) == plan.order.step_of(*place) + 1
            assert plan.fed_at[slot] == plan.order.step_of(*place) + 1
    for t in range(plan.order.grid.num_frames):
        for slot in action_slots(layout, t):
            assert fed.pop(slot) == plan.order.step_of(t, 0, 0) == plan.fed_at[slot]
    assert fed == {-1: 0}  # the prompt's last token
    assert plan.fed_at[last] >= plan.order.num_steps


@dataclasses.dataclass(frozen=True)
class Columns:
    """A frame column by column, so that raster successors come three steps later."""

    grid: diagd.TokenGrid
    row_start: RowStart = "temporal"
    num_steps: int = 15

    def step_of(self, t: int, i: int, j: int) -> int:
        return 3 * j + i


def test_a_token_that_is_read_later_is_fed_then_and_once():
    grid = diagd.TokenGrid(1, 3, 5)
    plan = make_plan(Columns(grid), SequenceLayout(grid, context_frames=1), pad=False)
    lanes = torch.tensor(plan.lanes).T
    true = Lanes.of(lanes[:, lanes[1] == lanes[2]])
    assert sorted(true.slots.tolist()) == list(range(-1, 14))
    for slot, step in zip(true.slots.tolist(), true.steps.tolist(), strict=True):
        assert slot < 0 or plan.fed_at[slot] == step


@given(plans())
@plan_settings
def test_no_lane_reads_a_slot_that_is_not_written(drawn):
    plan, layout = drawn
    offset = layout.context_slots + 1  # slot -offset becomes cache slot 0
    fed_at = torch.tensor([-1] * offset + plan.fed_at)
    known = set(range(-offset, 0))  # ids in the token buffer
    cached = set(range(-offset, -1))  # the prompt but its last token
    for t in range(plan.order.grid.num_frames):
        known.update(action_slots(layout, t))
    for step, (lanes, end) in enumerate(zip(steps_of(plan), plan.ends, strict=True)):
        assert set(lanes.inputs.tolist()) <= known
        assert (lanes.steps == step).all()
        assert end == int(lanes.positions.max()) + 1
        overwritten = set(lanes.slots.tolist()) - {SCRATCH}
        assert not overwritten & cached  # a true token stays as it was fed
        held = torch.arange(end + offset)
        visible = Seen(lanes.positions + offset, lanes.steps, held, fed_at[: len(held)]).mask()
        is_true = lanes.slots == lanes.inputs
        now = set(lanes.slots[is_true].tolist())
        for lane in range(len(lanes.positions)):
            seen = {slot - offset for slot in visible[lane].nonzero().flatten().tolist()}
            own = int(lanes.positions[lane])
            assert own in seen
            assert max(seen) == own  # nothing later in raster order
            assert seen - {own} <= cached | now  # no stand-in, nothing unwritten
        cached |= now
        known |= set(lanes.outputs.tolist()) - {SCRATCH}


@given(plans())
@plan_settings
def test_padding_repeats_a_lane_and_writes_to_scratch(drawn):
    plan, _ = drawn
    widest = max(len(lanes.slots) for lanes in steps_of(plan))
    for lanes in steps_of(plan):
        length = len(lanes.slots)
        padding = (lanes.slots == SCRATCH).nonzero().flatten().tolist()
        assert length == padded_width(length - len(padding), widest) <= widest
        for lane in padding:
            assert lanes.outputs[lane] == SCRATCH
            assert lanes.positions[lane] == lanes.positions[0]
            assert lanes.inputs[lane] == lanes.inputs[0]
        real = lanes.slots[lanes.slots != SCRATCH]
        assert len(real.unique()) == len(real)


def test_padded_steps_have_few_widths_and_little_padding():
    grid = diagd.TokenGrid(3, 40, 64)
    plan = make_plan(diagd.DiagonalSchedule(grid, 1, 40), SequenceLayout(grid, 0, 2))
    widths = {end - start for start, end in pairwise(plan.starts)}
    assert widths == {1, MIN_WIDTH, 16, 32, 65}
    assert len(plan.lanes) / sum(plan.num_fed) < 1.2
    assert [padded_width(count) for count in (1, 2, 8, 9, 33)] == [1, 8, 8, 16, 64]


@given(plans())
@plan_settings
def test_unpadded_steps_are_the_same_without_the_padding(drawn):
    plan, layout = drawn
    plan = make_plan(plan.order, layout)
    bare = make_plan(plan.order, layout, pad=False)
    real = torch.tensor(plan.lanes)[:, 1] != SCRATCH
    assert bare.lanes == [lane for lane in plan.lanes if lane[1] != SCRATCH]
    assert bare.ends == plan.ends
    assert [end - start for start, end in pairwise(bare.starts)] == [
        int(real[start:end].sum()) for start, end in pairwise(plan.starts)
    ]


@given(plans())
@plan_settings
def test_a_frame_is_done_with_its_last_token(drawn):
    plan, layout = drawn
    grid = plan.order.grid
    last = [layout.slot_of(t, grid.height - 1, grid.width - 1) for t in range(grid.num_frames)]
    for t in range(grid.num_frames):
        outputs = steps_of(plan)[plan.frame_ends[t]].outputs
        assert last[t] in outputs.tolist()


@pytest.mark.parametrize("row_start", ["temporal", "predecessor", "spatial"])
def test_raster_needs_no_stand_in(row_start):
    raster = diagd.DiagonalSchedule.raster(diagd.TokenGrid(2, 3, 5))
    schedule = dataclasses.replace(raster, row_start=row_start)
    plan = make_plan(schedule, SequenceLayout(schedule.grid))
    assert plan.starts == list(range(31))
    assert [lane[2] for lane in plan.lanes] == list(range(-1, 29))


def sources(row_start: RowStart, context_frames: int, frame_lag: int = 4) -> dict[tuple, int]:
    """Return the input of every stand-in, by the place it predicts."""
    schedule = diagd.DiagonalSchedule(diagd.TokenGrid(3, 3, 5), 2, frame_lag, row_start)
    plan = make_plan(schedule, SequenceLayout(schedule.grid, 0, context_frames))
    lanes = Lanes(*torch.tensor(plan.lanes).T)
    found = {}
    for lane in range(len(plan.lanes)):
        if lanes.inputs[lane] != lanes.positions[lane] and lanes.outputs[lane] != SCRATCH:
            place = tuple(int(axis[lane]) for axis in (lanes.frames, lanes.rows, lanes.columns))
            found[place] = int(lanes.inputs[lane])
    return found


def test_stand_ins_by_hand():
    """Slots of a 3x5 frame t: 15 * t + 5 * i + j; the context frame is frame -1."""
    assert sources("temporal", 1) == {
        (0, 1, 0): -10,
        (0, 2, 0): -5,
        (1, 0, 0): 0,
        (1, 1, 0): 5,
        (1, 2, 0): 10,
        (2, 0, 0): 15,
        (2, 1, 0): 20,
        (2, 2, 0): 25,
    }
    # steps: s_spa = 9; c[0] at row end (0, 0, 4) is written at step 4, needed by (1, 1, 0) at 6;
    # c[0, 2, 4] is written at step 8, too late for (2, 0, 0) at step 8, so its place falls back
    assert sources("predecessor", 1) == {
        (0, 1, 0): -11,
        (0, 2, 0): -6,
        (1, 0, 0): -1,
        (1, 1, 0): 4,
        (1, 2, 0): 9,
        (2, 0, 0): 15,
        (2, 1, 0): 19,
        (2, 2, 0): 24,
    }
    assert sources("spatial", 1) == {
        (0, 1, 0): 1,
        (0, 2, 0): 6,
        (1, 0, 0): 3,
        (1, 1, 0): 16,
        (1, 2, 0): 21,
        (2, 0, 0): 18,
        (2, 1, 0): 31,
        (2, 2, 0): 36,
    }


def test_stand_ins_fall_back_where_the_token_does_not_exist():
    spatial = sources("spatial", 0)
    for row_start in ("temporal", "predecessor"):
        written = sources(row_start, 0)
        assert written[0, 1, 0] == spatial[0, 1, 0]  # no frame before: the row above
        assert written[1, 0, 0] == 0  # no frame two before: the frame before
    # (0, 0, 4) is written at step 4, too late for (1, 1, 0) at step 1 + 2
    assert sources("predecessor", 0, frame_lag=1)[1, 1, 0] == 5


def test_unknown_row_start_is_an_error_that_names_the_choices():
    known = "learnt, action, predecessor, temporal, spatial"
    message = rf"^row_start must be one of {known}, got 'raster'$"
    with pytest.raises(ValueError, match=message):
        diagd.DiagonalSchedule(diagd.TokenGrid(2, 3, 5), 2, row_start="raster")  # pyright: ignore[reportArgumentType]
