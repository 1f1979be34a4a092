"""What every strategy keeps, and what each promises; a new one is a line in `CASES`.

Equal to its slow oracle, batch = one by one, stream = whole, another strategy in the middle of a
stream, raster's tokens or distribution where it says so, and refusals before any work.
"""

import dataclasses
from functools import cache

import pytest
import torch

import diagd
from diagd.decoding.engine import Stream
from diagd.decoding.generate_tokens import decode as strategy_decode
from diagd.decoding.schedule import SequenceLayout
from diagd.decoding.strategies.table import STRATEGIES, Strategy
from tests.decoding.cases import NUM_VISUAL, Case, model_of, reference_sampler

GREEDY = diagd.SamplingOptions()
SAMPLED = diagd.SamplingOptions(temperature=0.8, valid_range=(2, NUM_VISUAL))


CASES = (
    *("raster", "k=1", "k=2/predecessor", "k=1,d=2/spatial", "k=1/action", "zipar=2"),
    *("exact", "exact,lanes=7,draft-lag=1", "jacobi,lanes=9"),
)
every_strategy = pytest.mark.parametrize("name", CASES)


SAMPLINGS = GREEDY, SAMPLED


def decode(
    strategy: Strategy | str, case: Case, sampling: diagd.SamplingOptions, **options
) -> torch.Tensor:
    out = diagd.generate_tokens(
        model_of("native"),
        options.pop("prompt", case.prompt),
        strategy,
        options.pop("actions", case.actions()),
        case.context_frames,
        sampling=sampling,
        grid=case.grid,
        **{"seed": case.seed, **options},
    )
    return out.tokens


def sampler_of(case: Case, sampling: diagd.SamplingOptions):
    seeds = [case.seed + row for row in range(case.batch_size)]
    return reference_sampler(seeds, sampling.temperature, valid_range=sampling.valid_range)


@cache
def oracle(case: Case, sampling: diagd.SamplingOptions, row_lag: int, frame_lag: int):
    """Return the tokens of a schedule, drawn without a cache."""
    reference = case.reference(sampler_of(case, sampling))
    return reference.decode(case.num_frames, row_lag, frame_lag, case.actions())


def raster_oracle(case: Case, sampling: diagd.SamplingOptions) -> torch.Tensor:
    return oracle(case, sampling, case.width, case.height * case.width)


@every_strategy
@pytest.mark.parametrize("num_action_tokens", [0, 2])
def test_the_tokens_are_those_of_its_oracle(name, num_action_tokens):
    """Schedules have the cache-free reference; whoever promises raster's tokens has raster's."""
    strategy = diagd.parse_strategy(name)
    case = Case(num_frames=2, batch_size=1, num_action_tokens=num_action_tokens)
    for sampling in SAMPLINGS:
        tokens = decode(strategy, case, sampling)
        assert tokens.shape == (1, 2, 3, 5)
        raster = raster_oracle(case, sampling)
        if strategy.has_schedule:
            schedule = strategy.schedule(case.grid)
            own = dataclasses.replace(case, row_start=schedule.row_start)
            expected = oracle(own, sampling, schedule.row_lag, schedule.frame_lag)
            assert torch.equal(tokens, expected)
        assert torch.equal(tokens, raster) == (strategy.promise == "tokens")


@every_strategy
def test_a_batch_is_its_rows_one_by_one(name):
    case = Case(num_frames=2, num_action_tokens=2, seed=1)
    actions = case.actions()
    assert actions is not None
    for sampling in SAMPLINGS:
        together = decode(name, case, sampling)
        for row in range(case.batch_size):
            one = slice(row, row + 1)
            alone = decode(
                name,
                dataclasses.replace(case, batch_size=1),
                sampling,
                prompt=case.prompt[one],
                actions=actions[one],
                seed=case.seed + row,
            )
            assert torch.equal(together[one], alone)


def open_stream(case: Case, sampling: diagd.SamplingOptions) -> diagd.DecodingEngine:
    engine = diagd.DecodingEngine(
        model_of("native"),
        diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
        sampling=sampling,
        seed=case.seed,
    )
    engine.prefill(case.prompt, case.context_frames)
    return engine


@every_strategy
def test_a_stream_is_the_whole(name):
    case = Case(batch_size=1, num_action_tokens=2, row_lag=1)
    actions = case.actions()
    assert actions is not None
    for sampling in SAMPLINGS:
        whole = decode(name, case, sampling)
        engine = open_stream(case, sampling)
        parts = [frame for t in range(3) for frame in engine.decode(name, actions[:, t : t + 1])]
        assert engine.stream.num_generated == 3
        if name != "k=1,d=2/spatial":  # whose frames overlap: one sees less of the one before
            assert torch.equal(torch.stack(parts, 1), whole)


@every_strategy
def test_another_strategy_takes_over_in_the_middle_of_a_stream(name):
    """What stands is true tokens only: raster goes on from them as its oracle does."""
    case = Case(num_frames=2, batch_size=1, num_action_tokens=2)
    strategy, actions = diagd.parse_strategy(name), case.actions()
    assert actions is not None
    for sampling in SAMPLINGS:
        engine = open_stream(case, sampling)
        (first,) = engine.decode(strategy, actions[:, :1])
        (second,) = engine.decode("raster", actions[:, 1:])
        if strategy.promise == "tokens":
            written = torch.stack([first, second], 1)
            assert torch.equal(written, raster_oracle(case, sampling))
            continue
        reference, schedule = (
            case.reference(sampler_of(case, sampling)),
            strategy.schedule(case.grid),
        )
        reference = dataclasses.replace(reference, row_start=schedule.row_start)
        reference.decode(1, schedule.row_lag, schedule.frame_lag, actions[:, :1])
        expected = reference.decode(1, case.width, 15, actions[:, 1:])
        assert torch.equal(second, expected[:, 0])


@every_strategy
def test_refusals_come_before_any_work(name):
    strategy = diagd.parse_strategy(name)
    engine = open_stream(Case(num_action_tokens=2), SAMPLED)
    with pytest.raises(ValueError, match=r"^actions must .*\(2, 1, 2\), got None$"):
        engine.decode(strategy, None, 1)
    assert engine.stream.num_steps == 0


def test_every_strategy_of_the_table_is_a_case():
    assert {type(diagd.parse_strategy(name)) for name in CASES} == set(STRATEGIES)


class Backwards(Strategy):
    """A new rule, for the sake of the test: a frame's tokens one by one, as raster has them."""

    word = "backwards"


@strategy_decode.register
def _(strategy: Backwards, stream: Stream, layout: SequenceLayout):
    """Leave it to raster."""
    return stream.follow(diagd.Raster().schedule(layout.grid), layout)


def test_a_strategy_from_outside_of_the_table_is_taken_as_a_value():
    case = Case(batch_size=1)
    assert torch.equal(decode(Backwards(), case, GREEDY), raster_oracle(case, GREEDY))
