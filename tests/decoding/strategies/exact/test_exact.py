"""Exact decoding writes raster's tokens, whatever its lanes, drafts and batch."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from diagd.decoding.strategies.table import Exact, Jacobi, Strategy
from tests.decoding.cases import NUM_VISUAL, Case, cases, model_of

SAMPLINGS = (
    diagd.SamplingOptions(),
    diagd.SamplingOptions(temperature=1.0),
    diagd.SamplingOptions(temperature=0.7, top_p=0.9),
    diagd.SamplingOptions(temperature=1.5, top_k=7, valid_range=(2, NUM_VISUAL)),
)


@st.composite
def options(draw: st.DrawFn) -> Exact:
    return Exact(
        num_lanes=draw(st.integers(1, 12) | st.just(40)),
        draft_lag=draw(st.integers(0, 3) | st.none()),
        draft_width=draw(st.integers(1, 3)),
    )


def generate(model, case: Case, strategy: Strategy | str = "raster", **keywords):
    return diagd.generate_tokens(
        model,
        case.prompt,
        strategy,
        case.actions(),
        case.context_frames,
        grid=case.grid,
        **keywords,
    )


def check_equality(model, case: Case, options: Exact, sampling: diagd.SamplingOptions):
    how = {"sampling": sampling, "seed": case.seed}
    raster = generate(model, case, **how)
    exact = generate(model, case, options, **how)
    assert torch.equal(exact.tokens, raster.tokens)
    most = case.num_frames * (case.height * case.width + case.num_action_tokens)
    assert 1 <= exact.stats.num_steps <= most
    assert exact.stats.num_steps <= exact.stats.num_fed
    assert exact.stats.num_fed <= exact.stats.num_steps * (options.num_lanes or 0)


@given(case=cases(), options=options(), sampling=st.sampled_from(SAMPLINGS))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_exact_decoding_writes_the_tokens_of_raster(case, options, sampling):
    check_equality(model_of("native"), case, options, sampling)


@given(
    name=st.sampled_from(["own", "huggingface"]),
    case=cases(),
    options=options(),
    sampling=st.sampled_from(SAMPLINGS),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_it_does_with_torch_kernels_too(name, case, options, sampling):
    check_equality(model_of(name), case, options, sampling)


@pytest.mark.parametrize("draft_lag", [0, 1])
def test_places_with_ranges_of_their_own_are_kept(draft_lag):
    ranges = torch.zeros(3, 5, 2, dtype=torch.int64)
    ranges[..., 0] = torch.arange(15).view(3, 5) % 4
    ranges[..., 1] = 9 + torch.arange(15).view(3, 5) % 7
    sampling = diagd.SamplingOptions(temperature=1.0, valid_range=ranges)
    options = Exact(num_lanes=9, draft_lag=draft_lag)
    check_equality(model_of("native"), Case(num_action_tokens=2), options, sampling)


def test_fewer_steps_than_tokens_where_the_model_is_sure():
    """Unsure tokens cost a step each; with the seed of a place it takes about half of them."""
    case = Case(num_frames=3, height=4, width=5, batch_size=1, num_action_tokens=1)
    sampling = diagd.SamplingOptions(temperature=0.5)
    for strategy in (Jacobi(num_lanes=40), Exact(num_lanes=40)):
        out = generate(model_of("native"), case, strategy, sampling=sampling)
        assert out.stats.num_steps < 45  # of 60


def start(case: Case, **keywords) -> diagd.DecodingEngine:
    engine = diagd.DecodingEngine(
        model_of("native"),
        diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
        seed=3,
        sampling=diagd.SamplingOptions(temperature=1.0),
        **keywords,
    )
    engine.prefill(case.prompt, case.context_frames)
    return engine


def test_each_row_of_a_batch_takes_the_steps_that_it_takes_alone():
    """So the batch takes those of its slowest row, and the others end before."""
    case = Case(num_frames=2, batch_size=4, num_action_tokens=1)
    actions, steps = case.actions(), []
    assert actions is not None
    together = start(case)
    written = torch.stack(list(together.decode("exact,lanes=12", actions)), 1)
    for row in range(4):
        own = slice(row, row + 1)
        alone = diagd.DecodingEngine(
            model_of("native"), diagd.FrameFormat(3, 5, 1), sampling=SAMPLINGS[1], seed=3 + row
        )
        alone.prefill(case.prompt[own])
        assert torch.equal(
            torch.stack(list(alone.decode("exact,lanes=12", actions[own])), 1), written[own]
        )
        assert alone.stream.verified == together.streams[row].verified
        steps.append(alone.stream.num_steps)
    assert [stream.num_steps for stream in together.streams] == steps
    assert together.batch.num_steps == max(steps) > min(steps)


@pytest.mark.parametrize("draft_lag", [0, 2])
def test_a_stream_goes_on_past_a_full_context_and_an_early_stop(draft_lag):
    """Frames come one by one, a generator is closed with a frame under way, the context fills."""
    case = Case(num_action_tokens=2, batch_size=2)
    streams = []
    for strategy in (diagd.Raster(), Exact(num_lanes=20, draft_lag=draft_lag)):
        engine = start(case, max_slots=70, keep_frames=2)
        frames = []
        for turn in range(3):
            decoding = engine.decode(strategy, case.actions(4, seed=turn))
            frames += [next(decoding) for _ in range(2 + turn)]
        assert engine.stream.num_generated == 9
        assert engine.stream.num_dropped_frames > 0
        streams.append(torch.stack(frames))
    assert torch.equal(*streams)


def test_steps_say_what_they_fed_and_what_became_final():
    case = Case(num_action_tokens=1, batch_size=1)
    engine = start(case)
    list(engine.decode("exact,lanes=6", case.actions()))
    steps = engine.stream.verified
    assert len(steps) == engine.stream.num_steps
    assert sum(one.num_lanes for one in steps) == engine.stream.num_fed
    assert sum(one.num_accepted for one in steps) == 3 * (15 + 1)
    assert all(1 <= one.num_accepted <= one.num_lanes <= 6 for one in steps)
    places = [(one.frame, one.row, one.column) for one in steps]
    assert places == sorted(places)
    assert places[0] == (0, 0, 0)
    engine.prefill(case.prompt)
    assert engine.stream.verified == []


@pytest.mark.parametrize(
    ("kind", "keywords", "message"),
    [
        (Exact, {"num_lanes": 0}, "num_lanes must be at least 1, got 0"),
        (Exact, {"draft_lag": -1}, "draft_lag must be at least 0, got -1"),
        (Exact, {"draft_width": 0}, "draft_width must be at least 1, got 0"),
        (Jacobi, {"num_lanes": 0}, "num_lanes must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(kind, keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**keywords)
