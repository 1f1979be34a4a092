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


@dataclasses.dataclass(frozen=True)
class Conduct:
    """What holds of a strategy besides its promise.

    Attributes:
        streams: whether frames decoded one call at a time are those of one call.
        causal: whether a lane has seen all before it once its token is final, as after a prefill.
    """

    streams: bool = True
    causal: bool = True


CASES = {
    "raster": Conduct(),
    "k=1": Conduct(causal=False),
    "k=2/predecessor": Conduct(causal=False),
    # frames overlap: one sees less of the one before
    "k=1,d=2/spatial": Conduct(streams=False, causal=False),
    "k=1/action": Conduct(causal=False),
    "zipar=2": Conduct(causal=False),
    "exact": Conduct(),
    "exact,lanes=7,draft-lag=1": Conduct(),
    "jacobi,lanes=9": Conduct(),
}
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


def sampler_of(case: Case, sampling: diagd.SamplingOptions, first_frame: int = 0):
    seeds = [case.seed + row for row in range(case.batch_size)]
    draw = reference_sampler(seeds, sampling.temperature, valid_range=sampling.valid_range)
    return lambda logits, frame, *place: draw(logits, frame + first_frame, *place)


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
def test_a_seed_repeats_it(name):
    case = Case(batch_size=1, num_action_tokens=1, num_frames=2)
    for sampling in SAMPLINGS:
        first, second = (decode(name, case, sampling) for _ in range(2))
        assert torch.equal(first, second)


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
        if CASES[name].streams:
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
        reference = case.reference(sampler_of(case, sampling))
        if strategy.has_schedule:
            schedule = strategy.schedule(case.grid)
            reference = dataclasses.replace(reference, row_start=schedule.row_start)
            reference.decode(1, schedule.row_lag, schedule.frame_lag, actions[:, :1])
        elif CASES[name].causal:
            prompt = torch.cat([case.prompt, actions[:, 0], first.flatten(1)], 1)
            sampler = sampler_of(case, sampling, first_frame=1)
            longer = dataclasses.replace(case, context_frames=2)
            reference = dataclasses.replace(longer.reference(sampler), prompt=prompt)
        else:
            continue
        expected = reference.decode(1, case.width, 15, actions[:, 1:])
        assert torch.equal(second, expected[:, 0])


@every_strategy
def test_it_ends_where_the_context_is_full_and_goes_on(name):
    case = Case(batch_size=1, num_action_tokens=1, num_frames=5)
    for sampling in SAMPLINGS:
        engine = diagd.DecodingEngine(
            model_of("native"),
            diagd.FrameFormat(case.height, case.width, 1),
            max_slots=60,
            keep_frames=1,
            sampling=sampling,
        )
        engine.prefill(case.prompt, case.context_frames)
        frames = list(engine.decode(name, case.actions()))
        assert (len(frames), engine.stream.num_generated) == (5, 5)
        assert engine.stream.num_dropped_frames > 0


@every_strategy
def test_refusals_come_before_any_work(name):
    strategy = diagd.parse_strategy(name)
    engine = open_stream(Case(num_action_tokens=2), SAMPLED)
    with pytest.raises(ValueError, match="actions must"):
        engine.decode(strategy, None, 1)
    assert engine.stream.num_steps == 0


@every_strategy
def test_a_strategy_is_a_value(name):
    strategy = diagd.parse_strategy(name)
    assert len({strategy, diagd.parse_strategy(strategy.name)}) == 1
    assert strategy.promise in ("tokens", "no")
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.word = "other"  # pyright: ignore[reportAttributeAccessIssue]


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
