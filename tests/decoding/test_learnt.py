"""The row start `learnt`: an id of its own, which a slot that nobody sees feeds to stand-ins.

Where its embedding is that of the only action there is, it must do what the row start `action`
does.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.model import CausalModel
from diagd.decoding.schedule import DiagonalSchedule, FrameFormat, TokenGrid, make_plan
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.models.transformer import Transformer
from tests.worlds import HEIGHT, NUM_CODES, WIDTH, model_config, random_model

ACTION = NUM_CODES + 2
FRAME = FrameFormat(HEIGHT, WIDTH, 1)


@cache
def model_of(backend: str) -> CausalModel:
    """Return a model whose stand-in has the embedding of an action."""
    plain = random_model(replace(model_config(), position="rope"))
    weights = plain.state_dict()
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[ACTION : ACTION + 1]])
    model = Transformer(replace(plain.config, stand_in=True, extra_embeddings=1))
    model.load_state_dict(weights)
    return NativeModel(model) if backend == "native" else model


def actions_of(num_frames: int) -> torch.Tensor:
    return torch.full((2, num_frames, 1), ACTION)


def prompt() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(NUM_CODES, (2, HEIGHT * WIDTH), generator=generator)


@pytest.mark.parametrize("lags", ["k=1", "k=2", "k=1,d=4"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_with_the_embedding_of_the_action_it_writes_what_the_row_start_action_writes(backend, lags):
    grid, model = TokenGrid(4, HEIGHT, WIDTH), model_of(backend)
    given = model, prompt()
    told = {"actions": actions_of(4), "grid": grid, "seed": 3}
    told["sampling"] = diagd.SamplingOptions(1.0, valid_range=(0, NUM_CODES))
    learnt, action, temporal = (
        diagd.generate_tokens(*given, f"{lags}{start}", **told).tokens
        for start in ("/learnt", "/action", "")
    )
    assert torch.equal(learnt, action)
    assert not torch.equal(learnt, temporal)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_guided_stream_goes_on_with_it_after_a_full_context(backend):
    sampling = diagd.SamplingOptions(valid_range=(0, NUM_CODES))
    written = []
    for strategy in ("k=1/learnt", "k=1/action"):
        model = diagd.GuidedModel(model_of(backend), torch.tensor([[1, 2]]), 1, 2.0)
        engine = diagd.DecodingEngine(model, FRAME, 2, sampling, max_slots=3 * (HEIGHT * WIDTH + 1))
        engine.prefill(prompt())
        written.append(torch.stack(list(engine.decode(strategy, actions_of(5), 5)), 1))
        assert engine.streams[0].num_dropped_frames > 0
    assert torch.equal(*written)


@pytest.mark.parametrize("strategy", ["k=1", "k=2,d=6"])
def test_it_costs_what_the_row_start_action_costs(strategy):
    clips = torch.randint(NUM_CODES, (2, 3, HEIGHT, WIDTH), generator=torch.Generator())
    learnt, action = (
        strategy_nll(model_of("eager"), clips, actions_of(3), parse_strategy(strategy + start))
        for start in ("/learnt", "/action")
    )
    assert torch.equal(learnt, action)
    loss = diagd.strategy_loss(model_of("eager"), clips, actions_of(3), strategy + "/learnt")
    assert loss.item() == pytest.approx(learnt.mean().item(), abs=1e-5)


def test_a_plan_for_other_engines_names_no_slot_of_it():
    schedule = DiagonalSchedule(TokenGrid(1, 2, 3), 1, row_start="learnt")
    steps = make_plan(schedule, FrameFormat(2, 3, 1).layout(1, 1), pad=False).as_data()["steps"]
    assert [step["inputs"] for step in steps] == [[-1, 0], [1, None], [2, 4], [3, 5]]


def test_models_without_one_refuse_it_before_they_decode():
    model = random_model(model_config())
    told = {"actions": actions_of(1), "grid": TokenGrid(1, HEIGHT, WIDTH)}
    with pytest.raises(ValueError, match="learnt needs a model with a learnt stand-in: diagd fine"):
        diagd.generate_tokens(model, prompt(), "k=1/learnt", **told)
    clips = torch.zeros(1, 2, HEIGHT, WIDTH, dtype=torch.int64)
    with pytest.raises(ValueError, match="row start learnt needs a model with"):
        diagd.strategy_loss(model, clips, actions_of(2)[:1], "k=1/learnt")
    with pytest.raises(ValueError, match="stand_in needs an extra embedding, got 0"):
        replace(model.config, stand_in=True)
