"""A stream that outgrows its context: the oldest frame leaves, and nothing is read again."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from tests.decoding.cases import Case, Passing, cases, model_of, reference_sampler
from tests.decoding.strategies.test_conformance import CASES, SAMPLED, sampler_of
from tests.decoding.test_teacher_forcing import (
    logits_of_reference,
    logits_of_view,
    truth_of,
    view_of,
)

SHARP = diagd.SamplingOptions(temperature=0.7)


def open_stream(
    case: Case, window: int, model: Any = "own", spare: int = 0, **options: Any
) -> diagd.DecodingEngine:
    """Start a stream whose context holds so many frames, and a few slots more."""
    slots = case.height * case.width + case.num_action_tokens
    engine = diagd.DecodingEngine(
        model_of(model) if isinstance(model, str) else model,
        diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
        max_slots=case.prompt.shape[1] + (window - case.context_frames) * slots + spare,
        **{"sampling": SHARP, "seed": case.seed, **options},
    )
    engine.prefill(case.prompt, case.context_frames)
    assert engine.stream.window == window
    return engine


def decode(engine: diagd.DecodingEngine, strategy, actions, num_frames: int) -> torch.Tensor:
    return torch.stack(list(engine.decode(strategy, actions, num_frames)), dim=1)


def reference(case: Case, window: int, temperature=0.7):
    seeds = [case.seed + row for row in range(case.batch_size)]
    stream = case.reference(reference_sampler(seeds, temperature))
    return dataclasses.replace(stream, window=window)


@given(
    case=cases(),
    more=st.integers(1, 2),
    model=st.sampled_from(["own", "native"]),
    chunks=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    spare=st.integers(0, 1),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_frame_is_that_of_the_oracle_with_the_same_window(case, more, model, chunks, spare):
    window = max(2, case.context_frames + more)
    engine, slow = open_stream(case, window, model, spare), reference(case, window)
    for seed, num_frames in enumerate(chunks):
        actions = case.actions(num_frames, seed)
        written = decode(engine, case.strategy, actions, num_frames)
        expected = slow.decode(num_frames, case.row_lag, case.frame_lag, actions)
        assert torch.equal(written, expected)
    total = case.context_frames + sum(chunks)
    assert engine.stream.num_dropped_frames == max(0, total - window)
    assert engine.stream.num_held == min(total, window)


@cache
def window_oracle(case: Case, window: int, row_lag: int, frame_lag: int) -> torch.Tensor:
    stream = dataclasses.replace(case.reference(sampler_of(case, SAMPLED)), window=window)
    return stream.decode(case.num_frames, row_lag, frame_lag, case.actions())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_action_tokens", [0, 2])
def test_every_strategy_keeps_the_window(name, num_action_tokens):
    strategy, window = diagd.parse_strategy(name), 3
    case = Case(batch_size=1, num_action_tokens=num_action_tokens, num_frames=4, seed=2)
    engine = open_stream(case, window, "native", sampling=SAMPLED)
    written = decode(engine, strategy, case.actions(), 4)
    lags = case.width, case.height * case.width
    if strategy.has_schedule:
        schedule = strategy.schedule(case.grid)
        case = dataclasses.replace(case, row_start=schedule.row_start)
        lags = schedule.row_lag, schedule.frame_lag
    assert torch.equal(written, window_oracle(case, window, *lags))


def test_a_cancelled_frame_costs_nothing_but_what_was_to_leave():
    case = Case(num_action_tokens=1)
    engine, slow = open_stream(case, 3), reference(case, 3)
    actions = case.actions(5)
    expected = slow.decode(5, case.width, 15, actions)
    assert actions is not None
    first = decode(engine, "raster", actions[:, :4], 4)
    cut = engine.decode("raster", actions[:, 4:], 1)
    steps = engine.stream.num_steps

    class StopError(Exception):
        pass

    def stop(*_):
        if engine.stream.num_steps == steps + 7:
            raise StopError
        return run(*_)

    run = engine.batch.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.batch, "run", stop)
        with pytest.raises(StopError):
            next(cut)
    again = decode(engine, "raster", actions[:, 4:], 1)
    assert torch.equal(torch.cat([first, again], 1), expected)


def test_whoever_has_absolute_positions_reads_again():
    class Absolute(Passing):
        @property
        def shape(self):
            return dataclasses.replace(self.model.shape, relative_positions=False)

    case = Case()
    engine = open_stream(case, 4, Absolute(model_of("own")))
    decode(engine, "k=1", None, 8)
    assert not engine.stream.is_endless
    assert engine.stream.num_used <= engine.stream.max_slots


@given(case=cases(), num_frames=st.integers(2, 5), more=st.integers(0, 2))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_forward_under_a_window_gives_the_logits_of_the_stream(case, num_frames, more):
    window = max(2, case.context_frames + more)
    case = dataclasses.replace(case, num_frames=num_frames)
    frames, sequence = truth_of(case)
    expected = logits_of_reference(case, frames, window)
    logits = logits_of_view(model_of("own"), view_of(case, window=window), sequence)
    # float32 sums, reordered, over twice as many lanes as in `assert_close`
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@given(case=cases())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_window_that_holds_all_frames_changes_nothing(case):
    window = max(2, case.context_frames + case.num_frames)
    plain, view = view_of(case), view_of(case, window=window)
    for name in ("positions", "steps", "fed_at", "leaves_at"):
        assert torch.equal(getattr(view, name), getattr(plain, name))
    assert (view.visible() is None) == (plain.visible() is None)


def test_raster_order_needs_a_mask_where_a_frame_has_left():
    case = Case(num_frames=4, row_lag=5, frame_lag=15, num_action_tokens=1)
    view = view_of(case, window=3)
    visible = view.visible()
    assert visible is not None
    lanes = torch.arange(len(view.positions))
    assert torch.equal(view.mask_mod()(lanes, lanes, lanes[:, None], lanes[None, :]), visible)
    # prefix 0, given frame 1-15; then an action and 15 tokens each, frame 2 of which is the fourth
    assert visible[48].all(0) == visible[48, :49].all()
    assert not visible[49, 1:16].any()
    assert visible[49, 0]
    assert visible[49, 16:50].all()
