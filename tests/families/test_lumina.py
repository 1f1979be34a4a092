"""Lumina-mGPT in miniature: Chameleon whose rows end in a token, against Chameleon's class.

Prompts and loop are those of its makers' inference script: the new-line token closes each row,
and the other context of guidance begins with the image start.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import pre_tokenizers

import diagd
from diagd.families.chameleon.images import ChameleonPrompts
from diagd.families.checkpoints import find_model
from tests import oracles
from tests.families.images import (
    check_converted,
    check_int8,
    check_prices,
    diagonal_image,
    raster_images,
)
from tests.families.test_janus_chameleon import write_released
from tests.models.architectures import BOS, FIRST_VISUAL, IMAGE_START, NUM_VISUAL, PAD, architecture
from tests.models.test_image_models import chameleon_words
from tests.models.tiny import random_tokens

HEIGHT, WIDTH, SCALE = 4, 6, 4.0  # codes
ROW_END, TURN_END, TALL, WIDE = 4, 5, 7, 8
TEXT = "a red house"
NAMES = {
    "<reserved08799>": ROW_END,
    "<reserved08706>": TURN_END,
    "<reserved08802>": TALL,
    "<reserved08803>": WIDE,
}
VISUAL = torch.tensor([*range(FIRST_VISUAL, FIRST_VISUAL + NUM_VISUAL), ROW_END])
WITHOUT = torch.tensor([[IMAGE_START, TALL, WIDE]])
FIRST = NUM_VISUAL + 1  # our id of theirs is theirs and so much more, or its place in VISUAL


@pytest.fixture(scope="module")
def theirs() -> Any:
    freed: Any = deepcopy(architecture("chameleon"))
    freed.model.vocabulary_mapping.image_tokens = []  # its forward bans no id
    return freed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write it as its makers do, with the text tokenizer and Meta's VQ-GAN."""
    words = {"<pad>": PAD, "<s>": BOS, "</s>": 2, "<image>": 3, "<racm3:break>": IMAGE_START}
    words |= {**NAMES, "a": 34, "red": 35, "house": 36, "<unk>": 37, "Generate": 9}
    fast = chameleon_words(words, pre_tokenizers.Split("\n", "isolated"))
    config = {"z_loss_weight": 1e-5, "grid_height": HEIGHT, "grid_width": WIDTH}
    path, model = tmp_path_factory.mktemp("lumina"), architecture("chameleon")
    return write_released(path, model, NAMES, fast, **config)


def to_theirs(ids):
    return torch.where(ids < FIRST, VISUAL[ids.clamp(max=FIRST - 1)], ids - FIRST)


def own_logits(theirs):
    whole = oracles.chameleon_logits(theirs)
    return lambda fed, positions, visible: whole(to_theirs(fed), positions, visible)[..., VISUAL]


@pytest.mark.proves("Lumina-mGPT", "logits")
@torch.no_grad()
def test_logits_are_those_of_the_class(theirs, folder):
    model = diagd.load_model(folder)
    tokens = random_tokens(2, 41, vocab_size=model.num_embeddings)
    expected = theirs(to_theirs(tokens), use_cache=False).logits[..., VISUAL]
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.proves("Lumina-mGPT", "text")
def test_prompts_ask_in_a_sentence_and_tell_the_size(folder):
    """The sentence is one unknown word of this tokenizer, the text another one."""
    world = diagd.VideoGenerator.from_pretrained(folder)
    prompts, heard = cast(ChameleonPrompts, world.text), []
    words = prompts.words
    prompts.words = Hearing(words, heard)
    ids = prompts(TEXT)
    size = f"{16 * WIDTH}x{16 * HEIGHT}"
    assert heard == [f"Generate an image of {size} according to the following prompt:\n{TEXT}"]
    said = words(heard[0], add_special_tokens=False).input_ids
    prompt = [BOS, *said, TURN_END, IMAGE_START, TALL, WIDE]
    assert to_theirs(ids.prompt).tolist() == [prompt]
    assert to_theirs(ids.unconditional).tolist() == WITHOUT.tolist()


class Hearing:
    def __init__(self, words, heard):
        self.words, self.heard, self.bos_token_id = words, heard, words.bos_token_id

    def __call__(self, text, **how):
        self.heard.append(text)
        return self.words(text, **how)

    def convert_ids_to_tokens(self, ids):
        return self.words.convert_ids_to_tokens(ids)


@pytest.mark.proves("Lumina-mGPT", "native", "guidance", "raster")
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_raster_order_is_its_own_loop(theirs, folder, backend, scale):
    world = diagd.VideoGenerator.from_pretrained(folder, backend=backend)
    assert world.text is not None
    ids = world.text(TEXT)
    given = {} if scale == SCALE else {"guidance": scale}
    sampling = diagd.SamplingOptions()
    image = world.generate(text=TEXT, strategy="raster", sampling=sampling, **given)
    prompts = to_theirs(ids.prompt), to_theirs(ids.unconditional)
    expected = raster_images(theirs, *prompts, scale, VISUAL.tolist(), HEIGHT, WIDTH)
    assert torch.equal(to_theirs(image.tokens), expected)
    assert len(image.tokens.unique()) > 4


@pytest.mark.proves("Lumina-mGPT", "guidance", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2])
def test_diagonals_are_those_of_a_decoder_without_a_cache(theirs, folder, row_lag):
    world = diagd.VideoGenerator.from_pretrained(folder)
    assert world.text is not None
    ids = world.text(TEXT)
    expected = diagonal_image(own_logits(theirs), ids, SCALE, NUM_VISUAL, HEIGHT, WIDTH, row_lag)
    image = world.generate(text=TEXT, strategy=f"k={row_lag}", sampling=diagd.SamplingOptions())
    assert torch.equal(image.tokens, expected)


@pytest.mark.proves("Lumina-mGPT", "evaluate")
def test_prices_are_those_of_a_decoder_without_a_cache(theirs, folder, command, tmp_path):
    check_prices(command, folder, tmp_path / "out", own_logits(theirs), TEXT, NUM_VISUAL)


@pytest.mark.proves("Lumina-mGPT", "int8")
def test_int8_keeps_close_to_float32(folder):
    check_int8(folder)


@pytest.mark.proves("Lumina-mGPT", "pixels")
def test_pixels_are_those_of_the_codes_and_a_converted_folder_makes_them(folder, command, tmp_path):
    """Without row ends it is Chameleon's tokenizer, which has a test of its own."""
    world = diagd.VideoGenerator.from_pretrained(folder)
    image = world.generate(text=TEXT, seed=3)
    assert image.tokens.shape == (1, HEIGHT, WIDTH + 1)
    assert set(image.tokens[..., -1].flatten().tolist()) == {NUM_VISUAL}
    plain: Any = world.tokenizer
    assert torch.equal(image.frames, plain.tokenizer.decode(image.tokens[..., :-1]))
    assert image.frames.shape == (1, 2 * HEIGHT, 2 * WIDTH, 3)
    frames = image.frames
    assert torch.equal(plain.encode(frames)[..., :-1], plain.tokenizer.encode(frames))
    check_converted(command, folder, tmp_path / "ours", image, text=TEXT, seed=3)


def test_sizes_are_even(folder, tmp_path):
    side = json.loads((folder / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(side | {"grid_width": 5}))
    with pytest.raises(ValueError, match="grid_height and grid_width must be even, got 4 and 5"):
        find_model(folder, config)
    del side["grid_height"], side["grid_width"]
    config.write_text(json.dumps(side))
    found = find_model(folder, config).config
    assert (found.grid_height, found.grid_width) == (48, 49)
