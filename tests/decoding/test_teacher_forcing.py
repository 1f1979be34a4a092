"""One forward over the view of a schedule sees what decoding sees step by step."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import diagd
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.schedule import FrameFormat, SequenceLayout
from diagd.decoding.teacher_forcing import TeacherView, teacher_view
from diagd.models.transformer import Transformer
from tests.decoding.cases import NUM_VISUAL, VOCAB_SIZE, Case, Resampled, cases, model_of
from tests.models.tiny import KINDS, tiny_model

assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-5)  # float32 sums, reordered
ROW_END = 1


def view_of(case: Case, **options: Any) -> TeacherView:
    has_prompt = case.prompt.shape[1] > 0
    layout = SequenceLayout(case.grid, case.num_action_tokens, case.context_frames, has_prompt)
    return teacher_view(case.schedule, layout, case.prefix_length, **options)


def truth_of(case: Case, has_row_ends: bool = False) -> tuple[Tensor, Tensor]:
    """Frames (B, T, height, width) to force, and the whole sequence (B, N) that holds them."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    shape = (case.batch_size, case.num_frames, case.height, case.width)
    frames = torch.randint(NUM_VISUAL, shape, generator=generator)
    if has_row_ends:
        frames[..., -1] = ROW_END
    actions = case.actions()
    if actions is None:
        actions = frames.new_empty(*shape[:2], 0)
    written = torch.cat([actions, frames.flatten(2)], dim=2).flatten(1)
    return frames, torch.cat([case.prompt, written], dim=1)


def places(case: Case) -> list[tuple[int, int, int]]:
    extents = case.num_frames, case.height, case.width
    return list(torch.cartesian_prod(*map(torch.arange, extents)).reshape(-1, 3).tolist())


def logits_of_view(model, view: TeacherView, sequence: Tensor) -> Tensor:
    """Return (B, targets, V) of one forward, the targets in raster order."""
    logits = model.logits(
        sequence[:, view.sources], positions=view.positions, visible=view.visible()
    )
    return logits[:, view.readers]


def logits_of_reference(
    case: Case, frames: Tensor, window: int | None = None, has_row_ends: bool = False
) -> Tensor:
    """Return the same from the cache-free reference, made to write the given frames."""
    seen = {}

    def forced(logits: Tensor, t: int, i: int, j: int) -> Tensor:
        seen[t, i, j] = logits
        return frames[:, t, i, j]

    row_ends = [ROW_END] * case.height if has_row_ends else None
    stream = dataclasses.replace(case.reference(forced), window=window, row_ends=row_ends)
    stream.decode(case.num_frames, case.row_lag, case.frame_lag, case.actions())
    return torch.stack([seen[tuple(place)] for place in places(case)], dim=1)


@torch.inference_mode()
def logits_of_engine(model, case: Case, frames: Tensor) -> Tensor:
    """Return the same from the engine, made to write the given frames."""
    seen = {}

    def forced(logits, draw):
        first_step, (t, i, j) = not seen, (draw.frames[0], draw.rows[0], draw.columns[0])
        for lane, place in enumerate(zip(t.tolist(), i.tolist(), j.tolist(), strict=True)):
            if any(place) or first_step:  # lanes that write nothing claim (0, 0, 0), too
                seen[place] = logits[:, lane]
        return frames[:, t, i, j]

    resampled: Any = Resampled(model, forced)
    engine = DecodingEngine(
        resampled,
        FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
    )
    engine.prefill(case.prompt, case.context_frames)
    frames_written = engine.decode(case.strategy, case.actions(), case.num_frames)
    written = torch.stack(list(frames_written), dim=1)
    assert torch.equal(written, frames)
    return torch.stack([seen[tuple(place)] for place in places(case)], dim=1)


@given(case=cases())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_forward_gives_the_logits_of_the_cache_free_reference(case):
    frames, sequence = truth_of(case)
    expected = logits_of_reference(case, frames)
    assert_close(logits_of_view(model_of("own"), view_of(case), sequence), expected)


@given(case=cases())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_separators_that_end_rows_are_known_beforehand(case):
    """Where a separator comes next, nothing is read."""
    frames, sequence = truth_of(case, has_row_ends=True)
    expected = logits_of_reference(case, frames, has_row_ends=True)
    logits = logits_of_view(model_of("own"), view_of(case, known_row_ends=True), sequence)
    drawn = torch.tensor([column < case.width - 1 for _, _, column in places(case)])
    assert_close(logits, expected[:, drawn])


# sequences of GLM-Image have grids of two sizes, and are not trained on
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "glm-image"])
def test_every_kind_of_model_is_forced_alike(kind):
    """3-D rotary and learned positions take the slot of the lane, stand-ins included."""
    model = tiny_model(vocab_size=VOCAB_SIZE, image_vocab_size=NUM_VISUAL, **KINDS[kind])
    num_before = 2 if kind == "llamagen" else 0  # in 2-D the first frame has actions, too
    case = Case(num_frames=2, num_action_tokens=2, row_lag=1, frame_lag=3, prefix_length=num_before)
    frames, sequence = truth_of(case)
    torch.testing.assert_close(
        logits_of_view(model, view_of(case), sequence),
        logits_of_engine(model, case, frames),
        atol=1e-4,  # weights five times the usual width
        rtol=1e-4,
    )


@given(case=cases())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_raster_is_the_plain_causal_forward(case):
    raster = diagd.DiagonalSchedule.raster(case.grid)
    case = dataclasses.replace(case, row_lag=raster.row_lag, frame_lag=raster.frame_lag)
    _, sequence = truth_of(case)
    view = view_of(case)
    length = sequence.shape[1] - 1  # the last token predicts nothing
    assert torch.equal(view.sources, torch.arange(length))
    assert torch.equal(view.positions, torch.arange(length))
    assert view.visible() is None
    assert torch.equal(view.targets[view.readers], view.readers + 1)
    lanes = torch.arange(length)
    causal = torch.ones(length, length).tril().bool()
    assert torch.equal(view.mask_mod()(lanes, lanes, lanes[:, None], lanes), causal)


@given(case=cases())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_context_that_is_learnt_is_read_in_raster_order(case):
    model, view, plain = model_of("own"), view_of(case, learn_context=True), view_of(case)
    _, sequence = truth_of(case)
    length, num_actions = case.prompt.shape[1], case.num_action_tokens
    assert (view.targets != plain.targets).sum() == (view.targets >= 0).sum() - len(plain.readers)
    learnt = view.targets[view.readers][: len(view.readers) - len(plain.readers)].tolist()
    frame = case.height * case.width
    expected, start = [], case.prefix_length
    for t in range(case.context_frames):
        start += num_actions if t else 0
        expected += range(start, start + frame)
        start += frame
    assert learnt == [slot for slot in expected if slot]  # nothing predicts the very first token
    assert isinstance(model, Transformer)
    with torch.no_grad():
        causal = model.logits(sequence[:, : length - 1]) if length > 1 else None
    for number, slot in enumerate(learnt):
        assert causal is not None
        assert_close(logits_of_view(model, view, sequence)[:, number], causal[:, slot - 1])


@given(case=cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_mask_of_flex_attention_is_the_dense_one(case):
    view = view_of(case)
    lanes = torch.arange(len(view.positions))
    entries = view.mask_mod()(lanes[:1], lanes[:1], lanes[:, None], lanes[None, :])
    dense = view.visible()
    causal = torch.ones_like(entries).tril().bool()
    assert (dense is None) == torch.equal(entries, causal)
    assert torch.equal(entries, causal if dense is None else dense)


@given(case=cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_token_is_fed_once_and_predicted_once(case):
    view = view_of(case)
    _, sequence = truth_of(case)
    true = view.positions[~view.stand_in]
    assert torch.equal(true, torch.arange(sequence.shape[1] - 1))
    visual = [
        slot
        for slot in range(case.prompt.shape[1], sequence.shape[1])
        if (slot - case.prompt.shape[1]) % (case.num_action_tokens + case.height * case.width)
        >= case.num_action_tokens
    ]
    assert view.targets[view.readers].tolist() == visual
    assert torch.equal(view.positions[view.readers] + 1, view.targets[view.readers])
    assert (view.targets[view.stand_in] >= 0).all()
    assert (view.positions.diff() >= 0).all()


@pytest.mark.parametrize("length", [0, 3])
def test_whether_there_is_a_prompt_follows_from_its_length(length):
    case = Case()
    one, other = (
        teacher_view(case.schedule, SequenceLayout(case.grid, 1, 0, has_prompt), length)
        for has_prompt in (False, True)
    )
    for name in ("sources", "positions", "steps", "targets"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert (one.positions == length).any()
    with pytest.raises(ValueError, match="prompt must not be empty if no conditioning tokens"):
        teacher_view(case.schedule, SequenceLayout(case.grid))
