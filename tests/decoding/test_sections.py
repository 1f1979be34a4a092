"""Frames of several formats in one sequence, of models whose positions stand for rows."""

import pytest
import torch

import diagd
from diagd.decoding.schedule import Section
from diagd.decoding.visibility import Seen
from diagd.models.rotary import grid_coordinates
from tests.decoding.test_batch import prompt_of, written
from tests.models.tiny import tiny_model

FIELDS = {"num_action_tokens": 0, "grid_height": 2, "grid_width": 3, "image_vocab_size": 44}
PREVIEW, PICTURE = diagd.FrameFormat(2, 3), diagd.FrameFormat(5, 4)
GREEDY = diagd.SamplingOptions(valid_range=(0, 44))


def places_by_counting(length, grids):
    """Return (3, N): a prefix, then grids, each with rows and columns of its own."""
    places = [(0, 0, 0)] * length
    for frame, (height, width) in enumerate(grids):
        places += [(frame, i, j) for i in range(height) for j in range(width)]
    return torch.tensor(places).T


@torch.inference_mode()
@pytest.mark.parametrize("position", ["rope2d", "rope3d"])
def test_a_grid_of_another_size_has_rows_and_columns_of_its_own(position):
    model = tiny_model(position=position, prefix_length=7, **FIELDS)
    prompt, batch = prompt_of(7, seed=3), diagd.Batch(model, 1, 64)
    stream, nothing = batch.admit(PREVIEW, GREEDY), torch.empty(1, 0, dtype=torch.int64)
    stream.read(prompt, 0)
    tokens = [prompt, *map(torch.flatten, written(batch, stream, "raster", nothing))]
    stream.go_on_with(PICTURE)
    tokens += map(torch.flatten, written(batch, stream, "raster", nothing))
    known, slots = torch.cat(tokens)[None], torch.arange(33)
    turns = places_by_counting(7, [(2, 3), (5, 4)])
    if position == "rope2d":
        turns[:, :7] = -1
    given = slots[None], slots, Seen(slots, slots, slots, slots), model.make_cache(1, 34)
    logits = model(known, *given, coordinates=turns[:, None])[0, 6:-1, :44]
    assert torch.equal(known[0, 7:], logits.argmax(-1))


def test_sections_of_own_models_count_frames_on_and_rows_anew():
    config = tiny_model(position="rope3d", prefix_length=4, **FIELDS).config
    sections = [Section(4, PREVIEW, 2), Section(16, PICTURE)]
    turns = [
        grid_coordinates(config, torch.arange(16)),
        grid_coordinates(config, torch.arange(36), sections),
    ]
    assert turns[1] is not None
    assert torch.equal(turns[1], places_by_counting(4, [(2, 3), (2, 3), (5, 4)]))
    assert turns[0] is not None
    assert torch.equal(turns[0], turns[1][:, :16])


def test_a_stand_in_of_an_earlier_grid_is_its_place_scaled_and_rounded_down():
    layout = PICTURE.layout(1, before=PREVIEW)
    for i in range(5):
        for j in range(4):
            assert layout.slot_of(-1, i, j) == -6 + (i * 2 // 5) * 3 + j * 3 // 4
    behind = PICTURE.layout(1, context_frames=1, before=PREVIEW)
    assert behind.slot_of(-1, 1, 2) == -20 + 6
    assert behind.slot_of(-2, 4, 3) == -20 - 6 + 3 + 2


def test_an_earlier_grid_stands_in_only_where_nothing_is_between():
    model = tiny_model(**FIELDS)
    stream = diagd.Batch(model, 1, 64).admit(PICTURE)
    stream.read(prompt_of(20, seed=3), 0, [Section(2, PREVIEW, 1)])
    assert stream.before is None
    stream.read(prompt_of(8, seed=3), 0, [Section(2, PREVIEW, 1)])
    assert stream.before == PREVIEW


@pytest.mark.parametrize("strategy", ["raster", "k=1/spatial"])
def test_what_is_read_again_is_fed_as_a_prompt(strategy):
    """Raster has fed it so already; diagonals have not."""
    model, nothing = tiny_model(**FIELDS), torch.empty(1, 0, dtype=torch.int64)
    prompt, pictures = prompt_of(7, seed=3), []
    for read_again in (False, True):
        batch = diagd.Batch(model, 1, 64)
        stream = batch.admit(diagd.FrameFormat(5, 6), GREEDY)
        stream.read(prompt, 0)
        (preview,) = written(batch, stream, strategy, nothing)
        stream.go_on_with(PICTURE, read_again=read_again)
        pictures += written(batch, stream, strategy, nothing)
    alone = diagd.Batch(model, 1, 64)
    stream = alone.admit(PICTURE, GREEDY)
    stream.read(torch.cat([prompt, preview.flatten()]), 0)
    (expected,) = written(alone, stream, strategy, nothing)
    assert torch.equal(pictures[1], expected)
    assert torch.equal(pictures[0], expected) == (strategy == "raster")
