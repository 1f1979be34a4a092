"""LlamaGen's models of texts in miniature, against a plain reading of their public facts.

The plain one pads a text in front and hides the padding, as its makers do; ours leaves it out.
"""

import json
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import processors
from transformers import AutoTokenizer, T5EncoderModel

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.visibility import Seen
from diagd.families.checkpoints import build_model, find_model
from diagd.models.guidance import VectorPrompt
from diagd.models.huggingface import HuggingFaceModel
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import load_parts
from diagd.tokenizers.text import TextIds, text_states
from tests import oracles
from tests.families.images import check_prices, reference_image
from tests.families.llamagen.plain import (
    Tensors,
    random_text_checkpoint,
    random_tokenizer,
    text_logits,
)
from tests.models.architectures import architecture
from tests.test_real_models import write_t5

HIDDEN, LAYERS, HEADS, CODES, PLACES, SIZE = 128, 2, 2, 40, 7, 16
T5 = "flan-t5-xl"
HEIGHT, WIDTH, SIDE, SCALE = 3, 5, 3, 7.5
TEXT, OTHER, LONG = "a red door", "red", "a red door a red a door door"
GREEDY = SamplingOptions()


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return random_text_checkpoint(HIDDEN, LAYERS, CODES, PLACES, SIZE)


@pytest.fixture(scope="module")
def released(weights, tmp_path_factory) -> Path:
    """Write the files as they are released, with the encoder in a folder beside them."""
    folder = tmp_path_factory.mktemp("llamagen")
    torch.save({"model": weights}, folder / "t2i_XL_stage1_256.pt")
    tokenizer = random_tokenizer((32,) * 5, latent_channels=16, num_codes=CODES, code_size=8)
    torch.save({"model": tokenizer}, folder / "vq_ds16_t2i.pt")
    (folder / "config.json").write_text(json.dumps({"image_size": 16 * SIDE}))
    words = AutoTokenizer.from_pretrained(write_t5(folder / T5, SIZE))
    ending = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    words.backend_tokenizer.post_processor = ending
    words.save_pretrained(folder / T5)
    return folder / "t2i_XL_stage1_256.pt"


@pytest.fixture(scope="module")
def world(released) -> VideoGenerator:
    """Load it for images that are not square, so that rows are told from columns."""
    return world_of(released, lambda model: model)


def read(world, text) -> TextIds:
    ids = world.read_text(text)
    assert ids is not None
    return ids


def world_of(released, prepare) -> VideoGenerator:
    parts, found = load_parts(released), find_model(released)
    size = {"grid_height": HEIGHT, "grid_width": WIDTH, "max_positions": PLACES + HEIGHT * WIDTH}
    config = replace(found.config, **size)
    model = prepare(build_model(replace(found, config=config), "cpu", torch.float32))
    return VideoGenerator(model, config, parts.tokenizer, None, parts.defaults, text=parts.text)


@cache
@torch.no_grad()
def padded(released, text) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a text as its makers do: (places, size), and (places,) whether there is a token."""
    folder = released.parent / T5
    words, encoder = AutoTokenizer.from_pretrained(folder), T5EncoderModel.from_pretrained(folder)
    how = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    given = words([text.lower()], max_length=PLACES, **how)
    (states,), (mask,) = encoder(**given).last_hidden_state, given.attention_mask
    count = int(mask.sum())
    return torch.cat([states[count:] * 0, states[:count]]), mask.flip(0).bool()


def plain(weights, released, text, width=WIDTH):
    """Return logits of our ids behind this text, or behind none: the last `count` vectors."""
    states, is_text = padded(released, text)
    count = int(is_text.sum())
    free = PLACES - count

    def full(tokens, positions, visible):
        assert positions[:count].tolist() == list(range(count))
        said = int(tokens[0, 0]) < CODES + PLACES
        lanes = zip((positions + free).tolist(), tokens[0].tolist(), strict=True)
        seen = torch.ones(free + len(visible), free + len(visible), dtype=torch.bool)
        seen[free:, free:] = visible
        seen[:free, free:] = False
        given = states if said else weights["cls_embedding.uncond_embedding"]
        logits = text_logits(weights, HEADS, width, given, is_text, list(lanes)[count:], seen)
        return logits[None, free:]

    return full


@pytest.mark.proves("LlamaGen-T2I", "text")
@pytest.mark.parametrize("text", [TEXT, " A  Red\n door", OTHER, LONG])
def test_a_text_is_read_as_its_makers_read_it(weights, released, world, text):
    """Its vectors are the makers', in their places; so many stand for no text."""
    states, is_text = padded(released, " ".join(text.split()))
    ids = read(world, text)
    hidden = states[is_text] @ weights["cls_embedding.cap_proj.fc1.weight"].T
    hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
    expected = hidden @ weights["cls_embedding.cap_proj.fc2.weight"].T
    torch.testing.assert_close(ids.vectors, expected, atol=1e-4, rtol=0)
    places = is_text.nonzero()[:, 0]
    assert len(places) == min(PLACES, len(text.split()) + 1)
    assert (ids.prompt - CODES).tolist() == [places.tolist()]
    assert (ids.unconditional - ids.prompt == PLACES).all()


@pytest.mark.proves("LlamaGen-T2I", "logits")
@pytest.mark.parametrize("text", [TEXT, LONG])
def test_logits_are_those_of_the_plain_model(weights, released, world, text):
    """After a text and after none, prefilled in one go."""
    ids = read(world, text)
    codes = torch.randint(CODES, (1, 14), generator=torch.Generator().manual_seed(1))
    full = plain(weights, released, text)
    for prompt in (ids.prompt, ids.unconditional):
        tokens = torch.cat([prompt, codes], 1)
        slots = torch.arange(tokens.shape[1])
        model = world.guided(1.0, [ids])
        cache, seen = model.make_cache(1, len(slots) + 1), Seen(slots, slots, slots, slots)
        logits = model.forward(tokens, slots, slots, seen, cache)
        expected = full(tokens, slots, seen.mask())
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.5


@pytest.mark.proves("LlamaGen-T2I", "native", "guidance", "raster", "diagonals")
@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_images_are_those_of_the_plain_model(weights, released, world, scale):
    """Guided by default; raster's loop and diagonals, each token of both prompts fed anew."""
    given = {} if scale == SCALE else {"guidance": scale}
    raster = TEXT, WIDTH
    written = {}
    for text, row_lag in (raster, (TEXT, 1), (OTHER, 2)):
        ids, full = read(world, text), plain(weights, released, text)
        expected = reference_image(full, ids, scale, HEIGHT, WIDTH, row_lag, oracles.greedy, None)
        assert len(expected.unique()) > 4
        written[text, row_lag] = expected
    assert not torch.equal(written[raster], written[TEXT, 1])
    for backend in (world, world_of(released, NativeModel)):
        for text, row_lag in (*written, raster):
            image = backend.generate(text=text, strategy=f"k={row_lag}", sampling=GREEDY, **given)
            assert torch.equal(image.tokens, written[text, row_lag])
        several = {"strategy": "exact", "sampling": GREEDY, **given}
        for image in backend.generate([None, None], text=TEXT, **several):
            assert torch.equal(image.tokens, written[raster])


@pytest.mark.proves("LlamaGen-T2I", "int8")
def test_int8_keeps_close_to_float32(released):
    """Of one token; random models are chaotic, and later ones follow from it."""
    logits = []
    for prepare in (NativeModel, partial(NativeModel, weights="int8")):
        world = world_of(released, prepare)
        ids = read(world, TEXT)
        tokens = torch.cat([ids.prompt, torch.tensor([[3]])], 1)
        model, slots = world.guided(1.0, [ids]), torch.arange(tokens.shape[1])
        cache, seen = model.make_cache(1, len(slots) + 1), Seen(slots, slots, slots, slots)
        logits.append(model.forward(tokens, slots, slots, seen, cache))
    assert (logits[0] - logits[1]).std() < 0.1 * logits[0].std()


@pytest.mark.proves("LlamaGen-T2I", "evaluate")
def test_prices_are_those_of_a_decoder_without_a_cache(weights, released, command, tmp_path):
    check_prices(command, released, tmp_path / "out", plain(weights, released, TEXT, SIDE), TEXT)


def test_the_command_line_writes_a_picture(released, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--text", TEXT, "-k", 1, "--dtype", "float32", "--json"
    outcome = command("generate", "--model", released, *flags)
    assert outcome.code == 0, outcome.err
    assert outcome.document["pictures"] == ["dream.png"]
    image = diagd.VideoGenerator.from_pretrained(released).generate(text=TEXT)
    with Image.open("dream.png") as written:
        assert torch.equal(torch.tensor(list(written.tobytes())), image.frames.flatten())
    assert image.frames.shape == (1, 16 * SIDE, 16 * SIDE, 3)
    flags = "--baseline", "none", "--repeats", 1, "-k", 1, "--json"
    outcome = command("bench", "--model", released, *flags)
    assert outcome.code == 0, outcome.err
    assert {row["context_frames"] for row in outcome.document["rows"]} == {0}


def test_what_is_missing_is_said_in_one_line(released, command, tmp_path):
    flags = "--text", TEXT, "--output", tmp_path / "a.png"
    folder = shutil.copytree(released.parent, tmp_path / "copy")
    model = folder / released.name

    def refused(message, *given):
        command(*given).assert_refused(message)
        assert not list(tmp_path.glob("*.png"))

    refused("give --text", "generate", "--model", model)
    refused("cannot be converted: its text encoder is stored", "convert", model, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    config = json.loads((folder / T5 / "config.json").read_text())
    (folder / T5 / "config.json").write_text(json.dumps(config | {"d_model": 8}))
    refused("flan-t5-xl: .*expected d_model 16, got 8", "generate", "--model", model, *flags)
    shutil.rmtree(folder / T5)
    message = "text encoder google/flan-t5-xl not found: .*/flan-t5-xl"
    refused(message, "generate", "--model", model, *flags)
    (folder / "vq_ds16_t2i.pt").unlink()
    refused("such as vq_ds16_t2i.pt, beside it", "generate", "--model", model, *flags)
    assert diagd.load_model(model).vocab_size == CODES  # tokens need neither


def test_a_world_is_not_saved_without_what_reads_its_texts(released, tmp_path):
    world = VideoGenerator.from_pretrained(released)
    with pytest.raises(
        ValueError, match="cannot be converted: its text encoder is stored elsewhere"
    ):
        world.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_backend_whose_embeddings_cannot_be_written_is_refused():
    model = HuggingFaceModel(architecture("llama"))
    with pytest.raises(ValueError, match="does not support prompt embeddings: use another"):
        VectorPrompt(model, torch.arange(2), torch.zeros(2, 8), 3).make_cache(1, 9)


def test_an_encoder_whose_tokenizer_cannot_be_read_is_one_line(released, tmp_path):
    folder = shutil.copytree(released.parent / T5, tmp_path / T5)
    words = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(words | {"model": {"type": "of 2030"}}))
    with pytest.raises(ValueError, match=r"flan-t5-xl: not a T5 encoder: text tokenizer ca"):
        text_states(TEXT, folder, PLACES)
