"""Frames of two images: conditioning tokens that stand between the two halves of their rows."""

from dataclasses import dataclass

import pytest
import torch

import diagd
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.schedule import SequenceLayout
from diagd.decoding.strategies.table import Diagonal
from diagd.decoding.teacher_forcing import in_sequence, strategy_nll, teacher_view
from diagd.models.config import ModelConfig
from tests import oracles
from tests.decoding.cases import (
    MODELS,
    NUM_VISUAL,
    VOCAB_SIZE,
    full_forward,
    model_of,
)

GREEDY = diagd.SamplingOptions(valid_range=(0, NUM_VISUAL))


@dataclass(frozen=True)
class Seam:
    height: int
    width: int
    row_lag: int
    frame_lag: int | None
    leading: int
    seam: int
    context_frames: int = 2
    num_frames: int = 3

    @property
    def num_action_tokens(self):
        return self.leading + self.seam

    @property
    def frame(self):
        return diagd.FrameFormat(self.height, self.width, self.num_action_tokens, self.seam)

    @property
    def layout(self):
        return self.frame.layout(self.num_frames, self.context_frames)

    def ids(self, num_frames, seed=0):
        """Return actions and tokens of frames, (2, T, n) and (2, T, height, width)."""
        generator = torch.Generator().manual_seed(seed)
        shape = 2, num_frames, self.num_action_tokens
        actions = torch.randint(NUM_VISUAL, VOCAB_SIZE, shape, generator=generator)
        shape = 2, num_frames, self.height, self.width
        return actions, torch.randint(NUM_VISUAL, shape, generator=generator)

    def prompt(self):
        """A token, and context frames written out by hand."""
        actions, tokens = self.ids(self.context_frames, seed=1)
        parts = [torch.full((2, 1), 3)]
        for t in range(self.context_frames):
            upper, lower = tokens[:, t].chunk(2, 1)
            parts += [actions[:, t, : self.leading]] if t else []
            parts += [upper.flatten(1), actions[:, t, self.leading :], lower.flatten(1)]
        return torch.cat(parts, 1)

    def reference(self, sample_fn, window=None):
        return oracles.ReferenceStream(
            full_forward(),
            self.prompt(),
            *(self.height, self.width),
            num_action_tokens=self.num_action_tokens,
            context_frames=self.context_frames,
            sample_fn=sample_fn,
            window=window,
            num_seam_tokens=self.seam,
        )


def best(logits, *_):
    return logits[:, :NUM_VISUAL].argmax(-1)


SEAMS = [
    Seam(4, 3, 2, 5, leading=1, seam=2),
    Seam(2, 5, 1, None, leading=2, seam=1, context_frames=1),
    Seam(4, 3, 1, 2, leading=0, seam=2),
    Seam(2, 3, 3, 6, leading=1, seam=3),
]


def lag_of(case):
    return case.frame_lag or (case.height - 1) * case.row_lag + case.width


@pytest.mark.parametrize("case", SEAMS, ids=str)
def test_decoding_is_the_cache_free_reference(case):
    actions, _ = case.ids(case.num_frames)
    lags = case.row_lag, lag_of(case)
    schedule = diagd.DiagonalSchedule(case.layout.grid, *lags)
    given = {"context_frames": case.context_frames, "frame": case.frame}
    expected = case.reference(best).decode(case.num_frames, *lags, actions)
    assert len(expected.unique()) > 4
    for name in MODELS:
        out = diagd.generate_tokens(
            model_of(name), case.prompt(), schedule, actions, sampling=GREEDY, **given
        )
        assert torch.equal(out.tokens, expected)


def test_frames_leave_a_full_context_with_their_seam():
    case = SEAMS[0]
    actions, _ = case.ids(5)
    held = 3 * case.layout.slots_per_frame - case.leading + 1
    engine = DecodingEngine(
        model_of("own"),
        case.frame,
        batch_size=2,
        max_slots=held,
        sampling=GREEDY,
    )
    engine.prefill(case.prompt(), case.context_frames)
    tokens = torch.stack(list(engine.decode(Diagonal(case.row_lag, case.frame_lag), actions)), 1)
    reference = case.reference(best, window=3)
    expected = reference.decode(5, case.row_lag, lag_of(case), actions)
    assert torch.equal(tokens, expected)
    assert engine.stream.num_dropped_frames == 4


@pytest.mark.parametrize("case", SEAMS, ids=str)
def test_a_clip_costs_what_the_reference_would_pay(case):
    num_given = case.context_frames
    actions, tokens = case.ids(num_given + case.num_frames, seed=1)
    given, coming = case.ids(num_given, seed=1), actions[:, num_given:]
    actions[:, :num_given], tokens[:, :num_given] = given
    costs = torch.empty(2, case.num_frames, case.height, case.width)

    def pay(logits, frame, row, column):
        token = tokens[:, num_given + frame, row, column]
        costs[:, frame, row, column] = -logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
        return token

    case.reference(pay).decode(case.num_frames, case.row_lag, lag_of(case), coming)
    strategy = Diagonal(case.row_lag, case.frame_lag)
    prefix = {"prefix": torch.full((2, 1), 3), "frame": case.frame}
    nll = strategy_nll(model_of("own"), tokens, actions, strategy, num_given, **prefix)
    torch.testing.assert_close(nll, costs, atol=1e-4, rtol=0)


def test_raster_order_reads_tokens_as_they_stand():
    """The targets of a view are all visual tokens, context included, and no conditioning token."""
    case = SEAMS[0]
    actions, tokens = case.ids(case.context_frames + case.num_frames)
    sequence = torch.cat([torch.full((2, 1), 3), in_sequence(case.layout, actions, tokens)], 1)
    schedule = diagd.DiagonalSchedule.raster(case.layout.grid)
    view = teacher_view(schedule, case.layout, 1, learn_context=True)
    targets = view.targets[view.readers]
    assert torch.equal(sequence[:, targets], tokens.flatten(1))
    assert view.visible() is None


@pytest.mark.parametrize(
    ("height", "num_action_tokens", "seam"), [(4, 1, 2), (3, 2, 1), (4, 2, -1)]
)
def test_a_seam_that_fits_no_frame_is_refused(height, num_action_tokens, seam):
    with pytest.raises(ValueError, match="num_seam_tokens must be"):
        SequenceLayout(diagd.TokenGrid(1, height, 5), num_action_tokens, num_seam_tokens=seam)
    sizes = "hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim"
    fields = dict.fromkeys(sizes.split(), 4) | {"num_action_tokens": num_action_tokens}
    fields |= {"vocab_size": 9, "image_vocab_size": 7, "max_positions": 99, "grid_width": 5}
    with pytest.raises(ValueError, match="num_seam_tokens"):
        ModelConfig.from_dict({**fields, "grid_height": height, "num_seam_tokens": seam})
