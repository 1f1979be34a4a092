"""Emu3 in miniature, read from a folder of transformers' own, against transformers' own classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Emu3Model

import diagd
from diagd.decoding.sampling import SamplingOptions
from diagd.families.checkpoints import find_model, load_model
from diagd.models.guidance import GuidedModel
from diagd.models.huggingface import HuggingFaceModel
from diagd.pipeline.generate import PromptWorker
from diagd.pipeline.options import GenerateOptions
from tests import oracles
from tests.evaluation.lines import write_clips
from tests.families.emu3.folders import (
    HEIGHT,
    NUM_CODES,
    ROW_END,
    WIDTH,
    emu3,
    processor,
    vocabulary,
    write_emu3,
)
from tests.families.images import check_int8, diagonal_image, raster_images
from tests.worlds import smooth_frames

SCALE, TEXT = 3.0, "a red house"
IDS = vocabulary()
CODES = [IDS[f"<|visual token {code:06d}|>"] for code in range(NUM_CODES)]
VISUAL = torch.tensor([*CODES, IDS[ROW_END]])
WORDS = torch.tensor([id for id in range(len(IDS)) if id not in set(VISUAL.tolist())])
THEIRS = torch.cat([VISUAL, WORDS])  # their id of each of ours
GREEDY = SamplingOptions()


@pytest.fixture(scope="module")
def theirs():
    return emu3()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory) -> Path:
    return write_emu3(tmp_path_factory.mktemp("emu3"), theirs)


@pytest.fixture(scope="module")
def world(folder) -> diagd.VideoGenerator:
    return diagd.VideoGenerator.from_pretrained(folder)


def prompt_of(text):
    """Their processor's prompt; the area is what makes it 3 x 5 tokens."""
    how = {"return_for_image_generation": True, "ratio": "5:3", "image_area": 24 * 40}
    return torch.tensor(processor()(text=[text], **how).input_ids)


def own_logits(theirs):
    whole = oracles.llama_logits(theirs)
    return lambda fed, positions, visible: whole(THEIRS[fed], positions, visible)[..., VISUAL]


@pytest.mark.proves("Emu3", "text")
def test_prompts_are_those_of_the_processor(world):
    for text in (TEXT, "a big blue house", "house"):
        ids = world.text(text)
        assert torch.equal(THEIRS[ids.prompt], prompt_of(text))
        assert torch.equal(THEIRS[ids.unconditional], prompt_of(""))


@pytest.mark.proves("Emu3", "logits")
def test_logits_are_those_of_the_class(theirs, folder):
    model = load_model(folder)
    tokens = torch.arange(len(IDS)).roll(5)[None, :32]
    with torch.no_grad():
        expected = theirs(THEIRS[tokens], use_cache=False).logits[..., VISUAL]
        torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.proves("Emu3", "native", "guidance", "raster")
@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_raster_order_is_its_own_generate(theirs, folder, scale):
    given = {} if scale == SCALE else {"guidance": scale}
    prompts = prompt_of(TEXT), prompt_of("")
    expected = raster_images(theirs, *prompts, scale, VISUAL.tolist(), HEIGHT, WIDTH)
    assert len(expected.unique()) > 4
    for backend in ("eager", "native"):
        world = diagd.VideoGenerator.from_pretrained(folder, backend=backend)
        video = world.generate(text=TEXT, strategy="raster", sampling=GREEDY, **given)
        assert torch.equal(THEIRS[video.tokens], expected)


@pytest.mark.proves("Emu3", "guidance", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2, WIDTH])
def test_diagonals_are_those_of_a_decoder_without_a_cache(theirs, world, row_lag):
    ids, full = world.text(TEXT), own_logits(theirs)
    expected = diagonal_image(full, ids, SCALE, NUM_CODES, HEIGHT, WIDTH, row_lag)
    video = world.generate(text=TEXT, strategy=f"k={row_lag}", sampling=GREEDY)
    assert torch.equal(video.tokens, expected)


@pytest.mark.proves("Emu3", "int8")
def test_int8_keeps_close_to_float32(folder):
    check_int8(folder, torch.arange(len(IDS)).roll(5)[None, :32])


@pytest.mark.proves("Emu3", "pixels")
def test_pixels_are_those_of_its_own_decoder(theirs, world):
    video = world.generate(text=TEXT, seed=3)
    ends = torch.zeros(1, 3, dtype=torch.int64)
    image = torch.cat([THEIRS[video.tokens].flatten(1), ends], 1)
    pixels = theirs.decode_image_tokens(image_tokens=image, height=HEIGHT, width=WIDTH)
    expected = ((pixels + 1) * 127.5).round().clamp(0, 255).movedim(1, -1)
    assert video.frames.shape == (1, HEIGHT * 4, WIDTH * 4, 3)
    assert (video.frames - expected).abs().max() <= 1


def test_images_become_the_tokens_of_its_own_encoder(theirs, world):
    frames = smooth_frames(2, *world.frame_size_px)
    model: Emu3Model = theirs.model
    pixels = frames.movedim(-1, 1) / 127.5 - 1
    sizes: Any = torch.tensor([frames.shape[1:3]] * 2)
    with torch.no_grad():
        expected = model.get_image_tokens(pixels, sizes).view(2, HEIGHT, WIDTH + 1)
    assert torch.equal(THEIRS[world.tokenizer.encode(frames)], expected)


def test_several_images_have_seeds_of_their_own(world):
    several = world.generate([None] * 3, text=TEXT, seed=5)
    for number, image in enumerate(several):
        alone = world.generate(text=TEXT, seed=5 + number)
        assert torch.equal(image.tokens, alone.tokens)
    assert not torch.equal(several[0].tokens, several[1].tokens)


@pytest.mark.parametrize("strategy", ["k=1", "exact,lanes=8"])
def test_several_images_have_texts_of_their_own(strategy, world):
    """Of unlike lengths, and guided."""
    texts = [TEXT, "a boat", f"{TEXT} and {TEXT}"]
    images = world.generate([None] * 3, text=texts, seed=[5, 1, 7], strategy=strategy)
    for text, seed, image in zip(texts, (5, 1, 7), images, strict=True):
        alone = world.generate(text=text, seed=seed, strategy=strategy)
        assert torch.equal(image.tokens, alone.tokens)
    assert len({tuple(image.tokens.flatten().tolist()) for image in images}) == 3


def test_weights_in_several_files_and_a_folder_of_ours_make_the_same_image(
    theirs, folder, world, command, tmp_path
):
    sharded = write_emu3(tmp_path / "sharded", theirs, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert command("convert", sharded, tmp_path / "ours").code == 0
    world.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "pixels from texts.\n" in card
    code = card.split("```")[1].removeprefix("python")
    exec(code.replace("dream.png", str(tmp_path / "dream.png")), {})
    assert (tmp_path / "dream.png").is_file()
    expected = world.generate(text=TEXT)
    for path in (sharded, tmp_path / "ours", tmp_path / "saved"):
        image = diagd.VideoGenerator.from_pretrained(path).generate(text=TEXT)
        assert torch.equal(image.tokens, expected.tokens)
        assert torch.equal(image.frames, expected.frames)


def test_the_wrapper_of_transformers_makes_the_same_image(theirs, world):
    ids = world.text(TEXT)
    model = HuggingFaceModel(theirs)
    guided = GuidedModel(model, prompt_of(""), ids.prompt.shape[1], SCALE)
    valid = torch.zeros(HEIGHT, WIDTH + 1, 2, dtype=torch.int64)
    valid[..., 0], valid[..., 1] = min(CODES), max(CODES) + 1
    valid[:, -1] = torch.tensor([IDS[ROW_END], IDS[ROW_END] + 1])
    grid = diagd.TokenGrid(1, HEIGHT, WIDTH + 1)
    out = diagd.generate_tokens(
        guided,
        prompt_of(TEXT),
        "k=1",
        context_frames=0,
        grid=grid,
        sampling=SamplingOptions(valid_range=valid),
    )
    ours = world.generate(text=TEXT, sampling=GREEDY)
    assert torch.equal(THEIRS[ours.tokens], out.tokens[0])


def test_the_command_line_writes_a_picture(folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--model", folder, "--text", TEXT, "-k", 1, "--dtype", "float32", "--json"
    outcome = command("generate", *flags)
    assert outcome.code == 0, outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["dream.png"]
    assert outcome.document["pictures"] == ["dream.png"]
    assert outcome.document["contact_sheet"] is None
    (run,) = outcome.document["runs"]
    assert (run["strategy"], run["num_steps"]) == ("k=1", HEIGHT + WIDTH)
    with Image.open("dream.png") as image:
        assert image.size == (WIDTH * 4, HEIGHT * 4)
    outcome = command(
        "generate", *flags, "--images", 2, "--seed", 1, "--compare", "--output", "b.png"
    )
    assert outcome.code == 0, outcome.err
    raster, diagonal = outcome.document["runs"]
    assert (raster["strategy"], diagonal["strategy"]) == ("raster", "k=1")
    assert 0 <= diagonal["tokens_equal_to_raster"] <= 1
    assert 0 < diagonal["psnr_to_raster"] <= 100
    for name in outcome.document["pictures"]:
        with Image.open(name) as image:
            assert image.size == (2 * WIDTH * 4, HEIGHT * 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b-0.png", "b-1.png", "dream.png"]


def test_the_benchmark_takes_it(folder, command, tmp_path):
    assert command("convert", folder, tmp_path / "ours").code == 0
    flags = "--baseline", "none", "--repeats", 1, "-k", 1, "--json"
    for path in (folder, tmp_path / "ours"):
        outcome = command("bench", "--model", path, *flags)
        assert outcome.code == 0, outcome.err
        rows = outcome.document["rows"]
        assert [(row["strategy"], row["context_frames"], row["steps"]) for row in rows] == [
            ("raster", 0, HEIGHT * (WIDTH + 1)),
            ("k=1", 0, HEIGHT + WIDTH),
        ]


def test_what_users_get_wrong_is_said_in_one_line(folder, world, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(message, *flags, model=folder):
        command("generate", "--model", model, *flags).assert_refused(message)
        assert not list(tmp_path.glob("*.png"))

    refused('generates images from text: give --text, such as "a house"')
    refused(
        "text_encoder and text_embedding must be left out: this", "--text", "a", *encoder(tmp_path)
    )
    refused(
        "num_frames must be 1 for a text, got 2: for several .* --images",
        "--text",
        "a",
        "--frames",
        2,
    )
    refused(
        "prompt must be left out: this model takes texts alone", "--text", "a", "--prompt", folder
    )
    refused(
        "prompt must be left out: this model takes texts alone", "--text", "a", "--image", "a.png"
    )
    refused("text and image need 33 tokens, the model holds 32", "--text", "a " * 9)
    refused("text must be a non-empty string .*, got ' '", "--text", " ")
    refused("this model takes no actions", "--text", "a", "--actions", "forward")
    refused("images must be left out: this model generates videos", "--images", 2, model="doom")
    refused("this model takes no text", "--text", "a", model="doom")
    with pytest.raises(
        ValueError, match="text must be a non-empty string for this model, got Tensor"
    ):
        world.generate(text=torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="text must be one, or a list of 1, got 2"):
        world.generate(text=[TEXT, ""])  # a guidance pair is not a batch
    with pytest.raises(ValueError, match="not a stream: call generate"):
        world.start(None)
    doom = diagd.VideoGenerator.from_pretrained("doom")
    with pytest.raises(ValueError, match="this model takes no text, got text='a red house'"):
        doom.generate(smooth_frames(1, *doom.frame_size_px), "forward", text=TEXT)


def test_commands_that_need_clips_say_so_in_one_line(folder, command, tmp_path):
    clips = write_clips(tmp_path / "clips", count=1)
    flags = "--model", f"tiny={folder}", "--clips", clips, "--num-clips", 1, "--frames", 3
    outcome = command("evaluate", *flags, "--out", tmp_path / "out")
    outcome.assert_refused("tiny makes images of texts: give a file of them with --prompts")
    outcome = command("attention", "--model", folder, "--clips", clips)
    outcome.assert_refused("sequences that begin with a frame, which those of .* do not")
    command("play", "--model", folder, "--port", 0).assert_refused(
        "takes no actions, so there is nothing to p"
    )


def encoder(folder):
    (folder / "t5").mkdir()
    return "--text-encoder", folder / "t5"


def test_a_folder_without_its_text_tokenizer_is_refused(folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"bare: not a text tokenizer of emu3: the tokenizer has no"
    ):
        diagd.VideoGenerator.from_pretrained(bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"text tokenizer not found: .*tokenizer\.json"):
        diagd.VideoGenerator.from_pretrained(bare)
    assert load_model(bare).vocab_size == NUM_CODES + 1  # tokens need none
    (bare / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"Emu3 checkpoint: expected a config\.json with vocabulary_map beside it"
    ):
        find_model(bare / "model.safetensors")


def test_other_architectures_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["hidden_act"] = "gelu"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Emu3 checkpoint: hidden_act must be silu, got 'gelu'"):
        find_model(copy)


def test_a_worker_reads_the_text_once(folder):
    options = GenerateOptions(model=str(folder), text=TEXT)
    worker = PromptWorker(options)
    assert worker.makes_pictures
    assert worker.strategy.name == "k=1"
