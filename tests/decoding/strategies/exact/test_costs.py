"""Steps are timed without leaving a trace, and the best width is chosen."""

import torch

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.engine import Batch
from diagd.decoding.step import Lanes
from diagd.decoding.strategies.exact import (
    TOKENS_PER_STEP,
    best_num_lanes,
    step_costs,
    time_steps,
)
from diagd.models.guidance import GuidedModel
from tests.models.tiny import random_tokens, tiny_model

LANES = list(TOKENS_PER_STEP)


def test_costs_are_measured_once_and_leave_no_trace():
    model = NativeModel(tiny_model(num_action_tokens=0))
    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5))
    engine.prefill(random_tokens(1, 15, vocab_size=44))
    before = [engine.stream.tokens[:, :-1], engine.stream.fed_at]
    before = [tensor.clone() for tensor in before]
    costs = step_costs(engine.stream)
    assert list(costs) == LANES[: len(costs)]
    assert all(seconds > 0 for seconds in costs.values())
    after = [engine.stream.tokens[:, :-1], engine.stream.fed_at]
    assert all(map(torch.equal, before, after))
    assert step_costs(engine.stream) is costs
    assert (engine.stream.num_steps, engine.stream.num_fed) == (0, 0)


def test_steps_that_are_timed_have_lanes_that_kernels_may_not_skip(monkeypatch):
    """As they skip padding, which stands at scratch; and prompts of guidance stay as they are."""
    plain, slots, run = tiny_model(), [], Batch.run
    model = GuidedModel(plain, random_tokens(1, 8, vocab_size=44), 1, 2.0)

    def noted(batch, asking):
        slots.extend(Lanes.of(step.lanes).slots for _, step in asking)
        run(batch, asking)

    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5, 2))
    engine.prefill(random_tokens(1, 16, vocab_size=44))
    keys = engine.batch.buffers.cache.keys[0].clone()
    monkeypatch.setattr(Batch, "run", noted)
    step_costs(engine.stream)
    assert len({of.shape[1] for of in slots}) > 1
    for of in slots:
        assert (of >= torch.tensor([[16], [23]])).all()
        assert (of < engine.batch.scratch).all()
    for row, length in enumerate((16, 23)):
        assert torch.equal(
            engine.batch.buffers.cache.keys[0][row, :, :length], keys[row, :, :length]
        )


def test_lanes_that_cost_nothing_are_taken_and_dear_ones_left():
    assert best_num_lanes(dict.fromkeys(LANES, 1.0)) == LANES[-1]
    assert best_num_lanes({lanes: float(lanes) for lanes in LANES}) == LANES[0]
    assert best_num_lanes({lanes: 1 + 0.05 * lanes for lanes in LANES}) in (16, 24)
    assert best_num_lanes({1: 1.0, 8: 4.0, 16: 8.0}) == 1  # raster order


def test_measuring_ends_where_more_lanes_cannot_pay():
    timed = []

    def clock(num_lanes):
        timed.append(num_lanes)
        return float(num_lanes)

    costs = time_steps(clock)
    most = max(TOKENS_PER_STEP.values())
    assert list(costs) == timed == [n for n in LANES if n <= most] + timed[-1:]
    assert timed[-1] > most
