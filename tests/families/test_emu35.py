"""Emu3.5 in miniature, against transformers' Qwen3, whose decoder it is, and its makers' prompts.

A text tokenizer of bytes, two words and its names; 24 codes; images of 3 x 5.
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

import diagd
from diagd.decoding.sampling import SamplingOptions
from diagd.families.checkpoints import find_model, load_model
from tests import oracles
from tests.families.images import (
    check_converted,
    check_int8,
    check_prices,
    diagonal_image,
    raster_images,
)
from tests.families.test_janus_chameleon import write_vqgan
from tests.models.architectures import NUM_VISUAL
from tests.models.tiny import random_tokens
from tests.oracles import NO_STOP, TINY

HEIGHT, WIDTH, SCALE, TEXT = 3, 5, 5.0, "a red house"
RANKS = [bytes([byte]) for byte in range(256)] + [b"he", b"hel", b" r", b"ed", b" red"]
FIRST = len(RANKS)  # <|endoftext|>, two more, and <|extra_0|> to <|extra_204|>
EXTRA, IMAGE = FIRST + 3, FIRST + 208  # image token, start and end, and the codes
CODES = [*range(IMAGE + 3, IMAGE + 3 + NUM_VISUAL)]
ROW_END = EXTRA + 200
VISUAL = torch.tensor([*CODES, ROW_END])
WORDS = torch.tensor([*range(ROW_END), *range(ROW_END + 1, IMAGE + 3)])
THEIRS = torch.cat([VISUAL, WORDS])  # their id of each of ours
GREEDY = SamplingOptions()
NAMES = {"model_type": "Emu3", "architectures": ["Emu3ForCausalLM"]}
SIZES = {"visual_token_offset": IMAGE + 3, "grid_height": HEIGHT, "grid_width": WIDTH}


@pytest.fixture(scope="module")
def theirs() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **{**TINY, **NO_STOP, "initializer_range": 0.2},
        head_dim=16,
        vocab_size=len(THEIRS),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.data = 1 + torch.rand_like(weight)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("emu35")
    theirs.save_pretrained(path, max_shard_size="100KB")
    side = json.loads((path / "config.json").read_text())
    left_out = "rope_parameters", "rms_norm_eps"  # defaults of its class
    side = {name: side[name] for name in side if name not in left_out}
    (path / "config.json").write_text(json.dumps({**side, **NAMES, **SIZES}))
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(RANKS))
    (path / "emu3.tiktoken").write_text("".join(lines))
    write_vqgan(path).rename(path / "tokenizer" / "model.ckpt")
    return path


@pytest.fixture(scope="module")
def world(folder) -> diagd.VideoGenerator:
    return diagd.VideoGenerator.from_pretrained(folder)


def ids_of(text: str) -> list[int]:
    """Merge the pair whose whole has the lowest number, in each word with the space before it."""
    ids = list[int]()
    for word in text.replace(" ", "| ").replace(":", "|:").replace(".", "|.").split("|"):
        parts = [bytes([byte]) for byte in word.encode()]
        while wholes := [
            (RANKS.index(parts[i] + parts[i + 1]), i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in RANKS
        ]:
            _, i = min(wholes)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [RANKS.index(part) for part in parts]
    return ids


def prompt_of(task: str, text: str) -> Tensor:
    said = f"You are a helpful assistant{task}. USER: {text} ASSISTANT: "
    size = [ord("3"), ord("*"), ord("5")]
    return torch.tensor([[EXTRA + 203, *ids_of(said), EXTRA + 100, IMAGE + 1, *size, IMAGE]])


PROMPT, WITHOUT = prompt_of(" for t2i task", TEXT), prompt_of("", "")


def own_logits(theirs):
    whole = oracles.llama_logits(theirs)
    return lambda fed, positions, visible: whole(THEIRS[fed], positions, visible)[..., VISUAL]


@pytest.mark.proves("Emu3.5", "text")
def test_prompts_are_those_of_its_makers(world):
    ids = world.text(TEXT)
    assert torch.equal(THEIRS[ids.prompt], PROMPT)
    assert torch.equal(THEIRS[ids.unconditional], WITHOUT)
    named = world.text("a<|extra_200|><|extra_201|>b").prompt
    assert {ROW_END, ROW_END + 1} <= set(THEIRS[named].flatten().tolist())


@pytest.mark.proves("Emu3.5", "logits")
@torch.no_grad()
def test_logits_are_those_of_qwen3(theirs, folder):
    model = load_model(folder)
    tokens = random_tokens(2, 41, vocab_size=model.num_embeddings)
    expected = theirs(THEIRS[tokens], use_cache=False).logits[..., VISUAL]
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.proves("Emu3.5", "native", "guidance", "raster")
@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_raster_and_exact_decoding_are_a_loop_of_qwen3(theirs, folder, scale):
    given = {} if scale == SCALE else {"guidance": scale}
    expected = raster_images(theirs, PROMPT, WITHOUT, scale, VISUAL.tolist(), HEIGHT, WIDTH)
    assert len(expected.unique()) > 4
    for backend in ("eager", "native"):
        world = diagd.VideoGenerator.from_pretrained(folder, backend=backend)
        for strategy in ("raster", "exact"):
            image = world.generate(text=TEXT, strategy=strategy, sampling=GREEDY, **given)
            assert torch.equal(THEIRS[image.tokens], expected)


def test_drawn_images_of_a_batch_are_those_of_raster_order_alone(world):
    texts = [TEXT, "a boat beside it"]
    images = world.generate([None] * 2, text=texts, seed=[5, 1], strategy="exact")
    for text, seed, image in zip(texts, (5, 1), images, strict=True):
        alone = world.generate(text=text, seed=seed, strategy="raster")
        assert torch.equal(image.tokens, alone.tokens)
    assert not torch.equal(images[0].tokens, images[1].tokens)


@pytest.mark.proves("Emu3.5", "guidance", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2])
def test_diagonals_are_those_of_a_decoder_without_a_cache(theirs, world, row_lag):
    ids, full = world.text(TEXT), own_logits(theirs)
    expected = diagonal_image(full, ids, SCALE, NUM_VISUAL, HEIGHT, WIDTH, row_lag)
    image = world.generate(text=TEXT, strategy=f"k={row_lag}", sampling=GREEDY)
    assert torch.equal(image.tokens, expected)
    assert image.stats.num_steps == (HEIGHT - 1) * row_lag + WIDTH + 1


@pytest.mark.proves("Emu3.5", "evaluate")
def test_prices_are_those_of_a_decoder_without_a_cache(theirs, folder, command, tmp_path):
    check_prices(command, folder, tmp_path / "out", own_logits(theirs), TEXT, NUM_VISUAL)


@pytest.mark.proves("Emu3.5", "int8")
def test_int8_keeps_close_to_float32(folder):
    check_int8(folder)


@pytest.mark.proves("Emu3.5", "pixels")
def test_a_picture_is_cut_down_to_levels_and_a_converted_folder_makes_the_same(
    world, folder, command, tmp_path
):
    """Chameleon's VQ-GAN, which has a test of its own, but for how levels and codes are found."""
    image = world.generate(text=TEXT, seed=3)
    own: Any = world.tokenizer.tokenizer
    with torch.no_grad():
        pixels = own.pixels(own.codebook[image.tokens[..., :-1]].movedim(-1, 1))
        expected = ((pixels.movedim(1, -1) + 1) * 127.5).clamp(0, 255).to(torch.uint8)
        assert torch.equal(image.frames, expected)
        latents = own.latents(image.frames).movedim(1, -1)
        products = functional.linear(latents, own.codebook)
        assert torch.equal(own.encode(image.frames), products.argmax(-1))
    ours = check_converted(command, folder, tmp_path / "ours", image, text=TEXT, seed=3)
    again: Any = ours.tokenizer
    assert torch.equal(again.encode(image.frames), world.tokenizer.encode(image.frames))
    assert ours.text is not None
    assert torch.equal(ours.text(TEXT).prompt, world.text(TEXT).prompt)


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    copy = shutil.copytree(folder, target)
    side = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(side))
    return copy


def test_sizes_are_55_by_73_and_codes_begin_at_151854_unless_the_config_says_otherwise(
    folder, tmp_path
):
    side = json.loads((folder / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({name: side[name] for name in side if "grid" not in name}))
    found = find_model(folder, config).config
    assert (found.grid_height, found.grid_width) == (55, 73 + 1)
    del side["visual_token_offset"]
    config.write_text(json.dumps(side))
    expected = r"Emu3.5 checkpoint: expected codes from id 151854 on, got \d+ ids"
    with pytest.raises(ValueError, match=expected):
        find_model(folder, config)


def test_what_does_not_fit_is_said_in_one_line(folder, command, tmp_path):
    def refused(message: str, model: Path) -> None:
        outcome = command("generate", "--model", model, "--text", TEXT, "--out", tmp_path / "a.png")
        outcome.assert_refused(message)
        assert not (tmp_path / "a.png").exists()

    refused(
        "visual_token_offset must be above 211, got 5",
        edited(folder, tmp_path / "offset", visual_token_offset=5),
    )
    refused("hidden_act must be silu", edited(folder, tmp_path / "act", hidden_act="gelu"))
    damaged = edited(folder, tmp_path / "damaged")
    ranks = damaged / "emu3.tiktoken"
    ranks.write_text("".join(ranks.read_text().splitlines(keepends=True)[:-1]))
    refused(f"must hold tokens 0 to {FIRST - 1}, got {FIRST - 1} tokens .of another model", damaged)
    ranks.write_text("AAA 0\n")
    refused("not a text tokenizer of Emu3: Incorrect padding", damaged)
    ranks.unlink()
    refused("text tokenizer not found: .*emu3.tiktoken", damaged)
    assert load_model(damaged).vocab_size == NUM_VISUAL + 1  # tokens need none
    (damaged / "tokenizer" / "model.ckpt").unlink()
    refused("put model.ckpt of BAAI/Emu3.5-VisionTokenizer into .*tokenizer, or name", damaged)
    next(damaged.glob("model-00002*")).unlink()
    refused("not found: .*model-00002", damaged)
    with pytest.raises(ValueError, match=r"q_norm\.weight"):
        load_model(edited(folder, tmp_path / "other", model_type="qwen3"))
