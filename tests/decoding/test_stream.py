"""`diagd.DecodingEngine`: frames as they come; sessions go on, stop early, outgrow the context."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding import engine as stream_module
from tests import oracles
from tests.decoding.cases import (
    MODELS,
    NUM_VISUAL,
    Case,
    Passing,
    cases,
    model_of,
    reference_sampler,
)
from tests.models.tiny import tiny_model

stream_settings = settings(max_examples=15, deadline=None, derandomize=True)


def open_stream(case: Case, model=None, context_frames=None, **options) -> diagd.DecodingEngine:
    engine = diagd.DecodingEngine(
        model or model_of("native"),
        diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
        **options,
    )
    engine.prefill(case.prompt, case.context_frames if context_frames is None else context_frames)
    return engine


def decode(engine: diagd.DecodingEngine, case: Case, num_frames: int, actions) -> torch.Tensor:
    return torch.stack(list(engine.decode(case.strategy, actions, num_frames)), dim=1)


class CountingModel(Passing):
    """Pass everything on to a model and count the forward passes."""

    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.model.forward(*args, **kwargs)


@given(case=cases())
@stream_settings
def test_a_frame_arrives_with_its_last_token(case):
    model = CountingModel(model_of("own"))
    engine = open_stream(case, model)
    model.calls = 0
    for t, frame in enumerate(engine.decode(case.strategy, case.actions(), case.num_frames)):
        assert frame.shape == (case.batch_size, case.height, case.width)
        assert model.calls == case.schedule.step_of(t, case.height - 1, case.width - 1) + 1
    assert model.calls == case.schedule.num_steps


@given(case=cases(), chunks=st.lists(st.integers(1, 2), min_size=2, max_size=3))
@stream_settings
def test_a_session_goes_on_with_new_actions_and_another_strategy(case, chunks):
    engines = [open_stream(case, model_of(name)) for name in MODELS]
    reference = case.reference()
    raster = diagd.Diagonal(case.width, case.height * case.width, case.row_start)
    strategies = case.strategy, raster, diagd.Diagonal(1, 1, case.row_start)
    for seed, (num_frames, one) in enumerate(zip(chunks, strategies, strict=False)):
        actions = case.actions(num_frames, seed)
        expected = reference.decode(num_frames, one.row_lag, one.frame_lag, actions)
        for engine in engines:
            written = torch.stack(list(engine.decode(one, actions, num_frames)), dim=1)
            assert torch.equal(written, expected)


@given(case=cases(), completed=st.integers(1, 2), temperature=st.sampled_from([0.0, 1.0]))
@stream_settings
def test_a_cancelled_session_goes_on_from_its_completed_frames(case, completed, temperature):
    seeds = [case.seed + b for b in range(case.batch_size)]
    sampling = diagd.SamplingOptions(temperature)
    engine = open_stream(case, sampling=sampling, seed=case.seed)
    num_frames = completed + 1
    actions = case.actions(num_frames)
    frames = engine.decode(case.strategy, actions, num_frames)
    written = [next(frames) for _ in range(completed)]
    frames.close()

    reference = case.reference(reference_sampler(seeds, temperature))
    heard = None if actions is None else actions[:, :completed]
    expected = reference.decode(completed, case.row_lag, case.frame_lag, heard)
    assert torch.equal(torch.stack(written, dim=1), expected)
    actions = case.actions(1, seed=9)
    expected = reference.decode(1, case.row_lag, case.frame_lag, actions)
    assert torch.equal(decode(engine, case, 1, actions), expected)


def test_a_session_cancelled_before_it_began_has_not_moved():
    case = Case(num_action_tokens=2)
    engine = open_stream(case)
    engine.decode(case.schedule, case.actions(seed=8)).close()
    actions = case.actions()
    expected = case.reference().decode(3, case.row_lag, case.frame_lag, actions)
    assert torch.equal(decode(engine, case, 3, actions), expected)


def test_a_new_prompt_starts_over():
    case = Case()
    sampling = diagd.SamplingOptions(temperature=1.0)
    engine = open_stream(case, max_slots=62, sampling=sampling)
    first = decode(engine, case, 3, None)
    decode(engine, case, 1, None)
    assert engine.stream.num_dropped_frames > 0
    other = dataclasses.replace(case, seed=1)
    engine.prefill(other.prompt, 1)
    assert engine.stream.num_dropped_frames == 0
    expected = other.reference(reference_sampler([0, 1], 1.0)).decode(
        3, case.row_lag, case.frame_lag
    )
    assert torch.equal(decode(engine, case, 3, None), expected)
    engine.prefill(case.prompt, 1)
    assert torch.equal(decode(engine, case, 3, None), first)


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch):
    monkeypatch.setitem(stream_module.PREFILL_LANES, "cpu", 7)
    case = Case(prefix_length=10, context_frames=2)
    expected = case.reference().decode(3, case.row_lag, case.frame_lag)
    assert torch.equal(decode(open_stream(case), case, 3, None), expected)


@pytest.mark.parametrize(
    ("num_action_tokens", "prefix_length", "keep_frames", "chunk_lengths", "dropped"),
    [
        (0, 0, 2, [3, 2, 1], 4),
        (0, 3, 2, [3, 2, 1], 4),
        (2, 0, 2, [3, 2, 1], 4),
        (2, 3, 2, [3, 2, 1], 4),
        (0, 0, 1, [3, 3], 3),
        (2, 3, 1, [3, 3], 3),
        (0, 3, 0, [3, 3], 4),
        (2, 0, 0, [3, 3], 4),
    ],
)
def test_a_full_context_drops_the_oldest_frames_and_counts_them(
    num_action_tokens, prefix_length, keep_frames, chunk_lengths, dropped
):
    case = Case(num_action_tokens=num_action_tokens, prefix_length=prefix_length)
    # room for the prefix, the context frame and three more frames, but not a fourth
    max_slots = prefix_length + 15 + 4 * (15 + num_action_tokens) - 1
    sampling = diagd.SamplingOptions(temperature=1.0)
    engine = open_stream(
        case, max_slots=max_slots, keep_frames=keep_frames, sampling=sampling, seed=5
    )
    actions = case.actions(6)
    frames = decode(engine, case, 6, actions)
    assert engine.stream.num_dropped_frames == dropped

    # by hand: so many frames fit; then the prefix and the newest frames start a new sequence
    sampler = reference_sampler([5, 6], 1.0)
    reference = case.reference(sampler)
    written = []
    for chunk, num_frames in enumerate(chunk_lengths):
        done = sum(chunk_lengths[:chunk])
        heard = None if actions is None else actions[:, done : done + num_frames]
        if chunk > 0:
            reference = restart(case, reference, keep_frames, sampler, done)
        written.append(reference.decode(num_frames, case.row_lag, case.frame_lag, heard))
    assert torch.equal(frames, torch.cat(written, dim=1))


def restart(
    case: Case, old: oracles.ReferenceStream, keep: int, sampler, done: int
) -> oracles.ReferenceStream:
    """Return the stream that goes on from the prefix and the newest frames of an old one."""
    slots = [*range(case.prefix_length)]
    if keep > 0:
        slots += range(old.slot_of[old.num_frames - keep, 0, 0], old.num_slots)
    prompt = case.prompt[:, :0]
    if slots:
        prompt = torch.stack([old.ids[slot] for slot in slots], dim=1)
    return dataclasses.replace(
        case.reference(lambda logits, frame, *place: sampler(logits, done + frame, *place)),
        prompt=prompt,
        context_frames=keep,
    )


def test_a_video_longer_than_the_context_is_written_all_the_same():
    case = Case(num_frames=24, batch_size=1)
    out = diagd.generate_tokens(model_of("own"), case.prompt, case.schedule)
    # 320 slots hold 21 frames of 15
    assert out.tokens.shape == (1, 24, 3, 5)
    assert out.stats.num_dropped_frames == 1 + 24 - 21


def test_the_context_holds_what_fits_once_no_actions_stand_before_its_first_frame():
    case = Case(2, height=2, width=3, num_action_tokens=2, context_frames=0, prefix_length=1)
    engine = open_stream(case, max_slots=31, keep_frames=2)
    actions = case.actions(8)
    assert actions is not None
    frames = decode(engine, case, 8, actions)
    assert (engine.stream.num_dropped_frames, engine.stream.window) == (1 + 2 + 2, 4)

    reference, written = case.reference(), []
    for done, count in ((0, 3), (3, 2), (5, 2), (7, 1)):
        if done:
            reference = restart(case, reference, 2, oracles.greedy, done)
        heard = actions[:, done : done + count]
        written.append(reference.decode(count, case.row_lag, case.frame_lag, heard))
    assert torch.equal(frames, torch.cat(written, dim=1))


def test_nothing_is_decoded_before_a_prefill():
    engine = diagd.DecodingEngine(model_of("own"), diagd.FrameFormat(3, 5, 2))
    with pytest.raises(ValueError, match=r"^prefill must be called before decode"):
        engine.decode("k=1", torch.full((1, 1, 2), NUM_VISUAL))


def test_sampling_changes_between_calls_of_decode_only():
    engine = open_stream(Case())
    frames = engine.decode(Case().schedule)
    next(frames)
    with pytest.raises(ValueError, match=r"^sampling cannot change while decoding: close the gen"):
        engine.set_sampling(diagd.SamplingOptions(1.0))
    frames.close()
    engine.set_sampling(diagd.SamplingOptions(1.0))
    assert len(list(engine.decode("exact,lanes=5", num_frames=1))) == 1


def test_a_schedule_for_other_frames_is_an_error():
    engine = open_stream(Case())
    with pytest.raises(ValueError, match=r"height=3, width=5\), got .*height=5, width=3\)$"):
        engine.decode(diagd.DiagonalSchedule(diagd.TokenGrid(1, 5, 3), 1))
    with pytest.raises(ValueError, match=r"^row_lag must be in \[1, width=5\], got 6$"):
        engine.decode("k=6", num_frames=1)


def test_keep_frames_that_leave_no_room_are_an_error():
    case = Case()
    with pytest.raises(ValueError, match=r"^keep_frames must be 0 or more, got -1$"):
        open_stream(case, keep_frames=-1)
    engine = open_stream(case, max_slots=40, keep_frames=2)
    with pytest.raises(ValueError, match=r"^keep_frames=2 .* 40 slots$"):
        engine.decode(case.schedule)


@pytest.mark.parametrize("name", ["max_slots", "keep_frames"])
def test_numbers_that_are_not_whole_are_errors(name):
    case = Case()
    wrong: dict[str, Any] = {name: 47.5}
    message = rf"^{name} must be a whole number, got 47\.5$"
    with pytest.raises(ValueError, match=message):
        open_stream(case, **wrong)
    with pytest.raises(ValueError, match=message):
        diagd.generate_tokens(model_of("own"), case.prompt, case.schedule, **wrong)


def test_a_drop_that_leaves_nothing_to_start_from_is_an_error():
    engine = open_stream(Case(prefix_length=0), max_slots=31, keep_frames=0)
    with pytest.raises(ValueError, match=r"^keep_frames must be at least 1 without prefix"):
        engine.decode(Case().schedule)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_beyond_64_bits_is_an_error(seed):
    with pytest.raises(ValueError, match=rf"^seed must fit in 64 bits, got {seed}$"):
        open_stream(Case(batch_size=1), seed=seed)


@pytest.mark.parametrize("seed", [1.5, [0, 1.5]])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"^seed must be a whole number, got 1\.5$"):
        open_stream(Case(), seed=seed)


def test_one_seed_or_one_a_row():
    with pytest.raises(ValueError, match=r"^expected one seed, or one per row \(2\), got 3$"):
        open_stream(Case(), seed=[1, 2, 3])


def test_a_new_prompt_ends_what_is_under_way():
    case, other = Case(), dataclasses.replace(Case(), seed=1)
    engine = open_stream(case)
    first = engine.decode(case.schedule)
    next(first)
    engine.prefill(other.prompt, other.context_frames)
    assert list(first) == []
    assert torch.equal(decode(engine, other, 3, None), decode(open_stream(other), other, 3, None))


def test_a_second_decode_ends_the_first_and_goes_on_from_its_frames():
    case = Case()
    engine = open_stream(case)
    first = engine.decode(case.schedule)
    next(first)
    second = engine.decode(case.schedule)
    assert list(first) == []
    reference = case.reference()
    reference.decode(1, case.row_lag, case.frame_lag, None)
    expected = reference.decode(3, case.row_lag, case.frame_lag, None)
    assert torch.equal(torch.stack(list(second), dim=1), expected)


def test_a_session_opened_in_inference_mode_works_outside_of_it():
    case = Case(num_action_tokens=2)
    with torch.inference_mode():
        engine = open_stream(case, model_of("own"))
    actions = case.actions()
    expected = case.reference().decode(3, case.row_lag, case.frame_lag, actions)
    assert torch.equal(decode(engine, case, 3, actions), expected)


def test_numpy_integers_are_seeds():
    sampling = diagd.SamplingOptions(temperature=1.0)
    streams = (open_stream(Case(), sampling=sampling, seed=seed) for seed in (3, np.int64(3)))
    plain, numpy = (decode(engine, Case(), 3, None) for engine in streams)
    assert torch.equal(plain, numpy)


class Breaking(Passing):
    """Pass everything on to a model, but break the logits of one step."""

    def __init__(self, model, step, number):
        super().__init__(model)
        self.left, self.number = step, number

    def forward(self, *args, **kwargs):
        logits = self.model.forward(*args, **kwargs)
        self.left -= 1
        return logits if self.left else torch.full_like(logits, self.number)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "strategy",
    [
        "raster",
        "k=1",
        "k=2,d=3/predecessor",
        "exact,lanes=6",
        "jacobi,lanes=4",
        "zipar=2",
    ],
)
def test_broken_logits_end_the_frame_in_one_line_whatever_the_strategy(strategy, number):
    sampling = diagd.SamplingOptions(temperature=1.0, valid_range=(3, NUM_VISUAL))
    model = model_of("own")
    broken: Any = Breaking(model, 4, number)
    engine = diagd.DecodingEngine(broken, diagd.FrameFormat(3, 5), sampling=sampling)
    engine.prefill(torch.arange(16)[None] % NUM_VISUAL)  # one call; the others are steps
    with pytest.raises(ValueError, match=r"no token can be sampled at frame 0, row \d, column \d "):
        list(engine.decode(strategy, num_frames=1))


def test_the_error_says_where_and_in_which_layer_numbers_broke():
    model = tiny_model(num_action_tokens=0)
    model.model.blocks[1].self_attn.k_proj.weight.data[0, 0] = torch.nan
    for prepared in (model, NativeModel(model)):
        engine = diagd.DecodingEngine(prepared, diagd.FrameFormat(3, 5))
        engine.prefill(torch.arange(16)[None])
        message = (
            r"no token can be sampled at frame 0, row 0, column 0 \(seen after step 15\): "
            "the model produced NaN or infinite logits, first in layer 1"
        )
        with pytest.raises(ValueError, match=message):
            list(engine.decode("raster", num_frames=1))
