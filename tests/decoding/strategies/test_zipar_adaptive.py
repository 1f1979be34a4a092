"""Adaptive ZipAR: between its window and raster."""

import itertools
import re

import pytest
import torch

import diagd
from tests.decoding.cases import Case, model_of

CASE = Case(batch_size=1, num_action_tokens=2)
SAMPLED = diagd.SamplingOptions(temperature=1.0)


def decode(case: Case, window: int, sampling: diagd.SamplingOptions | None = None, seed: int = 0):
    engine = diagd.DecodingEngine(
        model_of("native"),
        case.height,
        case.width,
        num_action_tokens=case.num_action_tokens,
        batch_size=case.batch_size,
        sampling=sampling,
        seed=seed,
    )
    engine.prefill(case.prompt, case.context_frames)
    frames = list(engine.decode(f"zipar-adaptive={window}", case.actions(), case.num_frames))
    return torch.stack(frames, 1), engine


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@pytest.mark.parametrize("num_action_tokens", [0, 2])
def test_a_window_of_a_whole_row_is_raster(sampling, num_action_tokens):
    case = Case(batch_size=1, num_action_tokens=num_action_tokens)
    raster = diagd.generate_tokens(
        model_of("native"),
        case.prompt,
        diagd.DiagonalSchedule.raster(case.grid),
        case.actions(),
        sampling=sampling,
    )
    tokens, engine = decode(case, case.width, sampling)
    assert torch.equal(tokens, raster.tokens)
    assert engine.stream.num_steps == raster.stats.num_steps
    assert engine.stream.num_fed == raster.stats.num_fed


def test_a_row_waits_at_least_one_token_and_at_most_for_the_row_above():
    for window, seed in itertools.product((1, 2, 3), range(4)):
        _, engine = decode(CASE, window, SAMPLED, seed)
        frame_least = (CASE.height - 1) * min(window + 1, CASE.width) + CASE.width
        most = CASE.height * CASE.width
        assert CASE.num_frames * frame_least <= engine.stream.num_steps <= CASE.num_frames * most


def test_a_wider_window_takes_more_steps():
    steps = [
        sum(decode(CASE, w, SAMPLED, s)[1].stream.num_steps for s in range(6)) for w in (1, 3, 5)
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("window", [0, 6])
def test_a_window_out_of_its_range_is_refused(window):
    with pytest.raises(
        ValueError, match=re.escape(f"row_lag must be in [1, width=5], got {window}")
    ):
        decode(CASE, window)


def test_it_decodes_one_row():
    with pytest.raises(ValueError, match="zipar-adaptive=1 decodes one batch row, got 2"):
        decode(Case(batch_size=2), 1)
