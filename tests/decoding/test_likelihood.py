from functools import partial

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from diagd.decoding import teacher_forcing
from diagd.decoding.schedule import SequenceLayout
from diagd.decoding.strategies.table import Exact, Raster
from diagd.decoding.teacher_forcing import (
    gap_to_raster,
    strategy_nll,
    teacher_view,
    view_nll,
)
from diagd.models.transformer import Transformer
from tests.decoding.cases import MODELS, VOCAB_SIZE, Case, cases, model_of
from tests.decoding.test_teacher_forcing import logits_of_reference, truth_of

assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)  # float32 sums, reordered


def arguments_of(case: Case) -> dict:
    """Take a case's sequence apart into what `strategy_nll` is given."""
    frames, _ = truth_of(case)
    per_frame = case.height * case.width
    given, actions = case.prompt[:, case.prefix_length :], []
    context = []
    for t in range(case.context_frames):
        lead = case.num_action_tokens if t else 0
        actions.append(given[:, :lead] if lead else given.new_zeros(len(given), 0))
        context.append(given[:, lead : lead + per_frame].unflatten(1, (case.height, -1)))
        given = given[:, lead + per_frame :]
    tokens = torch.cat([torch.stack(context, 1), frames], 1) if context else frames
    ids = case.actions()
    if ids is not None and context:  # the first frame's own actions are not used
        actions[0] = given.new_zeros(len(given), case.num_action_tokens)
        ids = torch.cat([torch.stack(actions, 1), ids], 1)
    prefix = case.prompt[:, : case.prefix_length]
    return {
        "tokens": tokens,
        "actions": ids,
        "strategy": case.strategy,
        "context_frames": case.context_frames,
        "prefix": prefix,
    }


def expected_nll(case: Case) -> torch.Tensor:
    frames, _ = truth_of(case)
    logits = logits_of_reference(case, frames)
    costs = functional.cross_entropy(logits.movedim(-1, 1), frames.flatten(1), reduction="none")
    return costs.reshape(frames.shape)


@given(case=cases())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_it_is_what_the_cache_free_reference_would_pay(case):
    expected = expected_nll(case)
    for name in MODELS:
        assert_close(strategy_nll(model_of(name), **arguments_of(case)), expected)


def test_feeding_a_few_lanes_at_a_time_changes_nothing(monkeypatch):
    case = Case(row_lag=1, frame_lag=3, num_action_tokens=1)
    monkeypatch.setattr(teacher_forcing, "LANES", 4)
    found = strategy_nll(model_of("own"), **arguments_of(case))
    assert_close(found, expected_nll(case))


def test_another_rule_can_be_asked_for():
    """Seeing oneself only is what every target at the first place of a frame would get."""
    case = Case(num_frames=1, context_frames=1, prefix_length=0)
    _, sequence = truth_of(case)
    view = teacher_view(case.schedule, SequenceLayout(case.grid, 0, 1))
    model = model_of("own")
    assert isinstance(model, Transformer)
    found = view_nll(model, sequence, view, lambda q, r: q == r)
    alone = [
        model.logits(sequence[:, view.sources[lane], None], positions=view.positions[lane, None])
        for lane in view.readers
    ]
    targets = sequence[:, view.targets[view.readers]]
    expected = functional.cross_entropy(
        torch.cat(alone, 1).movedim(-1, 1), targets, reduction="none"
    )
    assert_close(found, expected)


def test_a_clip_too_long_is_refused():
    tokens = torch.zeros(1, 31, 3, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="clip must fit the model's 320 positions, got 464"):
        strategy_nll(model_of("own"), tokens, None, Raster())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": Exact()}, "strategy exact has no schedule"),
        ({"prefix": torch.full((2, 1), VOCAB_SIZE)}, r"prefix ids must be in \[0, 24\), got 24"),
        ({"tokens": torch.full((2, 4, 3, 5), -1)}, r"tokens ids must be in \[0, 24\), got -1"),
        ({"actions": torch.zeros(2, 4, 2)}, "actions must be int64, got torch.float32"),
        ({"actions": torch.full((2, 4, 2), 99)}, r"actions ids must be in \[0, 24\), got 99"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments = arguments_of(Case(num_action_tokens=2))
    with pytest.raises(ValueError, match=message):
        strategy_nll(model_of("own"), **{**arguments, **changes})


def test_the_gap_is_told_with_its_standard_error_over_clips():
    raster = torch.tensor([[2.0, 4.0], [3.0, 5.0], [4.0, 6.0]])
    above = torch.tensor([[0.5], [1.0], [1.5]])
    found = gap_to_raster(raster + above, raster)
    assert found == pytest.approx({"nll": 5.0, "gap": 1.0, "gap_error": 0.5 / 3**0.5})
    assert gap_to_raster((raster + above).mean(1), raster.mean(1)) == pytest.approx(found)
    assert gap_to_raster(raster[:1], raster[:1]) == {"nll": 3.0, "gap": 0.0, "gap_error": None}
