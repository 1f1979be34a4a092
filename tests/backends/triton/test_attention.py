"""`diagd/backends/triton/attention.py` against the words of the visibility rule, in float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diagd.backends.triton.launching import MAX_COUNTERS
from diagd.decoding.visibility import NEVER, Seen
from tests.backends.triton.interpreter import DEVICE, multiply_bfloat16

from diagd.backends.triton import attention  # isort: skip

# the scores of a few hundred keys, summed in another order; weights are rounded to the values' type
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Step:
    """What attention is given, in buffers whose every other number is NaN."""

    queries: Tensor  # (B, L, heads, D)
    keys: Tensor
    values: Tensor
    seen: Seen

    def attend(self, seen: Seen | None = None) -> Tensor:
        """Attend; the counters are left as they were found."""
        counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
        given = self.queries, self.keys, self.values, seen or self.seen
        out = attention.attend_slots(*given, counters)
        assert not counters.any()
        return out


def inside_of_nan(numbers: Tensor, dtype: torch.dtype, axis: int) -> Tensor:
    """Put numbers into the middle of a larger buffer, so that reading beside them is seen."""
    shape = list(numbers.shape)
    shape[axis] += 6
    buffer = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    return buffer.narrow(axis, 3, numbers.shape[axis]).copy_(numbers)


def among_others(numbers: Tensor) -> Tensor:
    """Put numbers (B, n) into the middle of wider rows that would be seen by all."""
    wider = torch.full((len(numbers), numbers.shape[1] + 5), -1, device=DEVICE)
    return wider[:, 2:-3].copy_(numbers)


def draw_step(
    batch: int,
    kv_heads: int,
    group: int,
    size: int,
    lanes: int,
    slots: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    start: int = 0,
) -> Step:
    """Lanes and slots in no order, of each sequence its own; some slots unwritten.

    The first two lanes are at one position.

    Args:
        start: of the positions, large where a stream has run for long.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (batch, count), generator=generator)

    orders = [torch.randperm(slots, generator=generator) for _ in range(batch)]
    held, fed_at = torch.stack(orders) + start, whole(-1, 7, slots)
    unwritten = whole(0, 5, slots) == 0
    held[unwritten], fed_at[unwritten] = -1, NEVER
    positions, steps = whole(0, slots, lanes) + start, whole(0, 7, lanes)
    positions[:, 1:2] = positions[:, :1]
    queries = torch.randn(batch, lanes, kv_heads * group, size, generator=generator)
    keys, values = torch.randn(2, batch, kv_heads, slots, size, generator=generator)
    return Step(
        inside_of_nan(queries, dtype, 1),
        inside_of_nan(keys, dtype, 2),
        inside_of_nan(values, dtype, 2),
        Seen(
            among_others(positions), among_others(steps), among_others(held), among_others(fed_at)
        ),
    )


def by_the_words(step: Step) -> Tensor:
    """Attend head by head and lane by lane; a lane that sees nothing gets zeros."""
    queries, keys, values = (t.double().cpu() for t in (step.queries, step.keys, step.values))
    out, window = torch.zeros_like(queries), step.seen.window
    group = queries.shape[2] // keys.shape[1]
    for row, rule in enumerate(zip(*(one.tolist() for one in step.seen[:4]), strict=True)):
        positions, steps, held, fed_at = rule
        for lane, (position, now) in enumerate(zip(positions, steps, strict=True)):
            seen = [
                slot
                for slot, (place, fed) in enumerate(zip(held, fed_at, strict=True))
                if place == position
                or (place < position and fed <= now and position - place < window)
            ]
            for head in range(queries.shape[2]):
                theirs = keys[row, head // group, seen]
                scores = theirs @ queries[row, lane, head] / math.sqrt(queries.shape[3])
                out[row, lane, head] = scores.softmax(0) @ values[row, head // group, seen]
    return out


def check(step: Step) -> None:
    out, expected = step.attend(), by_the_words(step)
    tolerance = TOLERANCE[step.queries.dtype]
    assert out.dtype == step.queries.dtype
    assert torch.equal(out, step.attend())
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([8, 18, 64, 80]),
    lanes=st.integers(1, 21),
    slots=st.integers(1, 290),
    seed=st.integers(0, 99),
)
def test_a_step_attends_to_what_the_rule_shows(batch, kv_heads, group, size, lanes, slots, seed):
    check(draw_step(batch, kv_heads, group, size, lanes, slots, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "lanes"), [(1, 1), (4, 5), (3, 23)])
def test_half_precision_runs_in_tiles_of_all_sizes(group, lanes, dtype, monkeypatch):
    multiply_bfloat16(monkeypatch)
    rows = {1: 16, 20: 32, 69: 64}[group * lanes]
    assert attention.tiling_of(group * lanes, 64, dtype).rows == rows
    check(draw_step(1, 2, group, 64, lanes, 270, dtype))


def test_a_stream_may_have_run_for_a_year():
    check(draw_step(1, 1, 2, 8, 5, 60, start=17 * 10**9))


@pytest.mark.parametrize("window", [1, 40])
def test_sliding_layers_see_the_last_positions(window):
    step = draw_step(1, 2, 2, 8, 7, 200, start=17 * 10**9)
    check(replace(step, seen=step.seen.within(window)))


def test_what_hidden_slots_hold_changes_no_bit():
    step = draw_step(1, 2, 1, 18, 7, 200)
    out = step.attend()
    (hidden,) = step.seen.fed_at == NEVER
    step.keys[:, :, hidden], step.values[:, :, hidden] = 1e4, -1e4
    assert torch.equal(out, step.attend())


def test_a_lane_that_sees_nothing_gets_zeros():
    step = draw_step(1, 2, 2, 8, 3, 150)
    step.seen.held.fill_(-1)
    step.seen.fed_at.fill_(NEVER)
    assert not step.attend().any()


def test_a_broken_number_is_not_lost():
    """It reaches the logits, where whoever writes the stream finds it."""
    step = draw_step(1, 1, 2, 8, 3, 150)
    step.queries[0, 2, 1] = torch.nan
    out = step.attend()
    assert out[0, 2, 1].isnan().all()
    assert not out[0, :, 0].isnan().any()
    assert not out[0, :2].isnan().any()


def test_how_many_lanes_share_a_step_does_not_change_a_bit_where_tiles_and_parts_are_the_same():
    step = draw_step(1, 2, 1, 18, 7, 100)
    own = slice(4, 5)
    at = step.seen._replace(positions=step.seen.positions[:, own], steps=step.seen.steps[:, own])
    alone = replace(step, queries=step.queries[:, own]).attend(at)
    assert torch.equal(step.attend()[:, own], alone)


def test_sequences_that_stand_alike_may_be_told_once():
    step = draw_step(1, 2, 2, 8, 3, 150)
    queries, keys, values = [
        torch.cat([one, one * 2]) for one in (step.queries, step.keys, step.values)
    ]
    rule: Any = step.seen[:4]
    told_once = Step(queries, keys, values, Seen(*(one[0] for one in rule))).attend()
    told_twice = Step(queries, keys, values, Seen(*(one.repeat(2, 1) for one in rule))).attend()
    assert torch.equal(told_once, told_twice)


@given(st.integers(1, 40000), st.integers(1, 600), st.sampled_from([16, 32, 64]))
def test_parts_are_whole_tiles_and_no_more_than_pay(num_slots, num_tiles, keys):
    size = attention.part_size(num_slots, num_tiles, keys)
    parts = -(-num_slots // size)
    assert size % keys == 0
    assert parts == 1 or (size >= attention.MIN_PART and parts <= attention.MAX_PARTS)
    assert parts == 1 or parts * num_tiles <= attention.NUM_PROGRAMS


@pytest.mark.parametrize(
    ("num_slots", "num_tiles"),
    [(12800, 8 * 5), (12800, 8), (5552, 4), (5560, 18), (2695, 5)],
)
def test_the_models_we_know_keep_a_gpu_busy(num_slots, num_tiles):
    """Full contexts, 32 keys at a time: Cosmos k=1 and raster, MC-AR 300M, WHAM 1.6B, ours."""
    parts = -(-num_slots // attention.part_size(num_slots, num_tiles, 32))
    assert parts * num_tiles >= 100
