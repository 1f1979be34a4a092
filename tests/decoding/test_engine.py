"""`diagd.generate_tokens` writes what the cache-free reference writes, token for token."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from tests import oracles
from tests.decoding.cases import (
    MODELS,
    NUM_VISUAL,
    ROW_STARTS,
    VOCAB_SIZE,
    Case,
    cases,
    causal_forward,
    model_of,
    reference_sampler,
)

engine_settings = settings(max_examples=18, deadline=None, derandomize=True)
few_settings = settings(max_examples=8, deadline=None, derandomize=True)
OURS = st.sampled_from(["own", "native"])


def generate(model, case: Case, **options) -> torch.Tensor:
    options.setdefault("actions", case.actions())
    options.setdefault("context_frames", case.context_frames)
    prompt = options.pop("prompt", case.prompt)
    schedule = options.pop("schedule", case.schedule)
    return diagd.generate_tokens(model, prompt, schedule, **options).tokens


@given(case=cases())
@few_settings
def test_raster_lags_reproduce_sequential_decoding(case):
    schedule = diagd.DiagonalSchedule.raster(case.grid)
    expected = oracles.greedy_raster(
        causal_forward, case.prompt, case.num_frames, case.height, case.width, case.actions()
    )
    for name in MODELS:
        assert torch.equal(generate(model_of(name), case, schedule=schedule), expected)


@given(case=cases())
@engine_settings
def test_greedy_decoding_is_the_cache_free_reference(case):
    expected = case.reference().decode(
        case.num_frames, case.row_lag, case.frame_lag, case.actions()
    )
    for name in MODELS:
        assert torch.equal(generate(model_of(name), case), expected)


@given(
    case=cases(),
    model=OURS,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 5]),
    top_p=st.sampled_from([None, 0.3, 0.9]),
)
@engine_settings
def test_sampled_decoding_is_the_cache_free_reference(case, model, temperature, top_k, top_p):
    valid_range = (2, NUM_VISUAL)
    sampling = diagd.SamplingOptions(temperature, top_k, top_p, valid_range)
    seeds = [case.seed + b for b in range(case.batch_size)]
    sampler = reference_sampler(seeds, temperature, top_k, top_p, valid_range)
    expected = case.reference(sampler).decode(
        case.num_frames, case.row_lag, case.frame_lag, case.actions()
    )
    assert torch.equal(generate(model_of(model), case, sampling=sampling, seed=case.seed), expected)


@given(case=cases(), model=OURS, temperature=st.sampled_from([0.0, 1.0]))
@engine_settings
def test_every_place_keeps_to_its_own_range_of_ids(case, model, temperature):
    generator = torch.Generator().manual_seed(case.seed)
    low = torch.randint(0, NUM_VISUAL - 4, (case.height, case.width), generator=generator)
    size = torch.randint(1, 5, (case.height, case.width), generator=generator)
    valid_range = torch.stack([low, low + size], dim=-1)
    sampling = diagd.SamplingOptions(temperature, valid_range=valid_range)
    tokens = generate(model_of(model), case, sampling=sampling, seed=case.seed)
    assert (tokens >= low).all()
    assert (tokens < low + size).all()
    seeds = [case.seed + b for b in range(case.batch_size)]
    reference = case.reference(reference_sampler(seeds, temperature, valid_range=valid_range))
    if (size[:, -1] == 1).all():
        reference.row_ends = low[:, -1].tolist()
    expected = reference.decode(case.num_frames, case.row_lag, case.frame_lag, case.actions())
    assert torch.equal(tokens, expected)


@given(case=cases(), model=st.sampled_from(MODELS))
@engine_settings
def test_separators_that_end_rows_stand_at_their_place_before_they_are_written(case, model):
    valid_range = torch.tensor([2, NUM_VISUAL]).repeat(case.height, case.width, 1)
    valid_range[:, -1] = torch.tensor([1, 2])
    sampling = diagd.SamplingOptions(valid_range=valid_range)
    tokens = generate(model_of(model), case, sampling=sampling, seed=case.seed)
    assert (tokens[..., -1] == 1).all()
    reference = case.reference(
        reference_sampler([0] * case.batch_size, 0.0, None, None, valid_range)
    )
    reference.row_ends = [1] * case.height
    expected = reference.decode(case.num_frames, case.row_lag, case.frame_lag, case.actions())
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("row_start", ROW_STARTS)
@pytest.mark.parametrize("num_action_tokens", [0, 2])
@pytest.mark.parametrize("context_frames", [0, 1, 2])
def test_stand_ins_when_nothing_but_the_policy_differs(
    row_start, num_action_tokens, context_frames
):
    case = Case(
        row_lag=1,
        frame_lag=2,
        num_action_tokens=num_action_tokens,
        context_frames=context_frames,
        row_start=row_start,
        seed=5,
    )
    expected = case.reference().decode(3, 1, 2, case.actions())
    assert torch.equal(generate(model_of("native"), case), expected)


@pytest.mark.parametrize("strategy", ["k=1", "exact,lanes=9"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_lengths_and_contexts_are_a_batch(name, strategy):
    contexts, lengths = [1, 0, 2], [3, 20, 1]
    given = zip(contexts, lengths, range(3), strict=True)
    each = [
        Case(2, context_frames=count, prefix_length=length, batch_size=1, seed=seed)
        for count, length, seed in given
    ]
    options = {"grid": each[0].grid, "sampling": diagd.SamplingOptions(temperature=0.8)}
    prompts = [case.prompt[0] for case in each]
    out = diagd.generate_tokens(
        model_of(name), prompts, strategy, None, contexts, seed=[5, 4, 5], **options
    )
    for case, seed, written in zip(each, (5, 4, 5), out.tokens, strict=True):
        alone = diagd.generate_tokens(
            model_of(name), case.prompt, strategy, None, case.context_frames, seed=seed, **options
        )
        assert torch.equal(written, alone.tokens[0])
    with pytest.raises(ValueError, match="context_frames: expected 3 numbers, got 2"):
        diagd.generate_tokens(model_of(name), prompts, strategy, None, [1, 0], **options)
    with pytest.raises(
        ValueError, match=r"prompt must be int64 .*, or a list of \(P,\), got .*\(1, 18\)"
    ):
        diagd.generate_tokens(model_of(name), [one[None] for one in prompts], strategy, **options)


def test_stats_count_the_steps_of_the_schedule():
    case = Case()
    out = diagd.generate_tokens(model_of("own"), case.prompt, case.schedule)
    assert out.tokens.shape == (2, 3, 3, 5)
    assert out.tokens.dtype == torch.int64
    assert out.stats.num_steps == case.schedule.num_steps
    assert out.stats.seconds > 0
    assert out.stats.tokens_per_second == pytest.approx(2 * 45 / out.stats.seconds)
    assert out.stats.frames_per_second == pytest.approx(2 * 3 / out.stats.seconds)


@pytest.mark.parametrize("shape", [(15,), (1, 2, 8)])
def test_prompt_must_be_a_batch_of_tokens(shape):
    with pytest.raises(ValueError, match=r"^prompt must be .*\(batch.*, P\), got .*$"):
        generate(model_of("own"), Case(), prompt=torch.zeros(shape, dtype=torch.int64))


def test_prompt_must_hold_ids_of_the_model():
    for wrong, given_ids in ((-1, r"-1\.\.\d+"), (VOCAB_SIZE, rf"\d+\.\.{VOCAB_SIZE}")):
        prompt = Case().prompt
        prompt[0, 3] = wrong
        message = rf"^prompt ids must be in \[0, {VOCAB_SIZE}\), got {given_ids}$"
        with pytest.raises(ValueError, match=message):
            diagd.generate_tokens(model_of("own"), prompt, Case().schedule)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3, 2), (2, 2, 2), (2, 4, 2)])
def test_actions_must_fit_the_batch_and_the_grid(shape):
    case = Case(num_action_tokens=2)
    message = rf"^actions must be .*\(2, 3, \d\), got .*{re.escape(str(shape))}$"
    with pytest.raises(ValueError, match=message):
        generate(model_of("own"), case, actions=torch.full(shape, NUM_VISUAL))


@pytest.mark.parametrize(
    ("wrong", "given_ids"), [(-1, r"-1\.\.\d+"), (VOCAB_SIZE, rf"\d+\.\.{VOCAB_SIZE}")]
)
def test_actions_must_hold_ids_of_the_model(wrong, given_ids):
    case = Case(num_action_tokens=2)
    actions = case.actions()
    assert actions is not None
    actions[1, 2, 0] = wrong
    message = rf"^actions ids must be in \[0, {VOCAB_SIZE}\), got {given_ids}$"
    with pytest.raises(ValueError, match=message):
        generate(model_of("own"), case, actions=actions)


@pytest.mark.parametrize(("num_action_tokens", "taken"), [(0, 30), (2, 32)])
def test_context_frames_must_fit_in_the_prompt(num_action_tokens, taken):
    case = Case(num_action_tokens=num_action_tokens, prefix_length=14)  # 14 + 15 tokens
    message = rf"^context_frames=2 need {taken} tokens, got a prompt of 29$"
    with pytest.raises(ValueError, match=message):
        generate(model_of("own"), case, context_frames=2)
    with pytest.raises(ValueError, match=r"^context_frames must be 0 or more, got -1$"):
        generate(model_of("own"), case, context_frames=-1)


def test_a_prompt_that_fills_the_model_is_an_error():
    case = Case(prefix_length=300)
    message = r"^prompt and one frame need 330 slots, the context holds 320$"
    with pytest.raises(ValueError, match=message):
        generate(model_of("own"), case)


@pytest.mark.parametrize("context_frames", [0, 1, 2])
def test_exactly_what_fits_needs_no_room_to_spare(context_frames):
    case = Case(num_frames=1, context_frames=context_frames)
    expected = case.reference().decode(1, case.row_lag, case.frame_lag)
    assert torch.equal(generate(model_of("own"), case), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "exact"}, "grid must be given for strategy exact"),
        ({"grid": diagd.TokenGrid(4, 3, 5)}, "grid must be that of the schedule, .*=3, .*=4"),
    ],
)
def test_options_that_contradict_each_other_are_errors(options, message):
    case = Case()
    options = {"schedule": case.schedule, **options}
    with pytest.raises(ValueError, match=message):
        diagd.generate_tokens(model_of("own"), case.prompt, **options)


def test_a_schedule_of_another_number_of_frames_is_refused():
    case = Case()
    engine = diagd.DecodingEngine(
        model_of("own"), diagd.FrameFormat(case.height, case.width), batch_size=2
    )
    engine.prefill(case.prompt)
    with pytest.raises(ValueError, match=r"^schedule must be for .*=5, .*, got one for .*=3, "):
        engine.decode(case.schedule, num_frames=5)
