"""Passes are timed without leaving a trace, and the best width is chosen."""

import torch

from diagd.backends.native.model import NativeModel
from diagd.decoding.costs import NUM_LANES, TOKENS, best_num_lanes
from diagd.decoding.exact import ExactEngine
from tests.models.tiny import random_tokens, tiny_model


def test_costs_are_measured_once_and_leave_no_trace():
    model = NativeModel(tiny_model(num_action_tokens=0))
    engine = ExactEngine(model, 3, 5)
    engine.prefill(random_tokens(1, 15, vocab_size=44))
    before = engine.tokens[:, :-1].clone(), engine.cache.keys[0][:].clone()
    costs = engine.measure_costs()
    assert list(costs) == list(NUM_LANES[: len(costs)])
    assert all(seconds > 0 for seconds in costs.values())
    assert torch.equal(engine.tokens[:, :-1], before[0])
    assert engine.measure_costs() is costs
    assert engine.num_steps == 0


def test_lanes_that_cost_nothing_are_taken_and_dear_ones_left():
    assert best_num_lanes(dict.fromkeys(NUM_LANES, 1.0)) == NUM_LANES[-1]
    assert best_num_lanes({lanes: float(lanes) for lanes in NUM_LANES}) == NUM_LANES[0]
    assert best_num_lanes({lanes: 1 + 0.05 * lanes for lanes in NUM_LANES}) in (16, 24)
    assert best_num_lanes({1: 1.0, 8: 4.0, 16: 8.0}) == 1  # raster order


def test_measuring_ends_where_more_lanes_cannot_pay(monkeypatch):
    model = NativeModel(tiny_model(num_action_tokens=0))
    engine = ExactEngine(model, 3, 5)
    timed = []

    def seconds(dry_pass, num_lanes):
        timed.append(num_lanes)
        return float(num_lanes)

    monkeypatch.setattr("diagd.decoding.costs._time", seconds)
    costs = engine.measure_costs()
    most = max(TOKENS.values())
    assert list(costs) == timed == [n for n in NUM_LANES if n <= most] + timed[-1:]
    assert timed[-1] > most
