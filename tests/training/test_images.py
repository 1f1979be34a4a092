"""Image models finetuned on pictures with texts or classes, by the command."""

import json
import math
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from PIL import Image

import diagd
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import find_model
from diagd.tokenizers.shards import read_shards
from diagd.training.images import read_images
from diagd.training.options import FinetuneOptions
from diagd.training.train import finetune
from tests.families.emu3.folders import emu3 as random_emu3
from tests.families.emu3.folders import write_emu3
from tests.families.llamagen.folders import NUM_CODES, write_llamagen
from tests.models.architectures import architecture
from tests.models.test_image_models import janus_processor
from tests.training.runs import assert_same_run, log_of, run_killed

WORDS = "a red house", "a house", "red"
QUICK = {"batch_size": 3, "compile": False, "precision": "no", "warmup_steps": 2, "log_every": 1}
QUICK |= {"strategy": ("raster", "k=1"), "learning_rate": 1e-2, "optimizer": "adamw"}


@pytest.fixture(scope="module")
def janus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("janus")
    architecture("janus").save_pretrained(folder)
    janus_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llamagen(tmp_path_factory):
    return write_llamagen(tmp_path_factory.mktemp("llamagen"))


@pytest.fixture(scope="module")
def emu3(tmp_path_factory):
    """A model whose rows end in separators, and whose prompts without a text are shorter."""
    return write_emu3(tmp_path_factory.mktemp("emu3"), random_emu3())


def noise(seed, size=(40, 56)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


@pytest.fixture
def pictures(tmp_path):
    """Write a picture of each of three texts."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, words in enumerate(WORDS):
        noise(number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(words)
    return folder


@pytest.fixture
def classes(tmp_path):
    """Write pictures in folders named by class."""
    for number, name in enumerate(("207", "class 5", "5")):
        folder = tmp_path / "classes" / name
        folder.mkdir(parents=True)
        noise(number).save(folder / f"{number}.png")
    return tmp_path / "classes"


def options(model, images, out, **changes):
    given = {"init": str(model), "images": images, "out": out, **QUICK, **changes}
    return FinetuneOptions(**given)


def flags_of(model, images, out, *more):
    quick = "--batch-size", 3, "--no-compile", "--learning-rate", 0.01, "--steps", 2
    return "finetune", "--model", model, "--images", images, "--out", out, *quick, *more


def test_a_model_of_texts_learns_its_pictures_and_generates_from_its_folder(
    janus, pictures, command, tmp_path
):
    out = tmp_path / "out"
    report = finetune(options(janus, pictures, out, steps=120))
    losses = [line["loss"] for line in log_of(out)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert set(report["validation_loss_by_strategy"]) == {"raster", "k=1"}
    made = command(
        "generate", "--model", out, "--text", "a red house", "--output", tmp_path / "a.png"
    )
    assert made.code == 0, made
    world, true = (
        diagd.VideoGenerator.from_pretrained(out),
        read_shards(tmp_path / "pictures-tokens"),
    )
    how = {"guidance": 1.0, "sampling": diagd.SamplingOptions()}
    for strategy in ("raster", "k=1"):  # greedily: what was learnt by heart
        image = world.generate(text=WORDS[0], strategy=strategy, **how)
        assert (image.tokens[0] == true.tokens[0, 0]).float().mean() > 0.9


def test_a_model_of_classes_learns_its_pictures(llamagen, classes, command, tmp_path):
    out = tmp_path / "out"
    finetune(options(llamagen, classes, out, steps=40))
    losses = [line["loss"] for line in log_of(out)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    made = command("generate", "--model", out, "--actions", "207", "--output", tmp_path / "a.png")
    assert made.code == 0, made
    assert json.loads((out / "actions.json").read_text()) == {"kind": "LlamaGen"}


@pytest.mark.parametrize("name", ["janus", "llamagen", "emu3"])
def test_the_loss_is_the_price_of_the_strategies(name, request, pictures, classes, tmp_path):
    """Of the last picture, which is held out, before any step has an effect."""
    model, images = request.getfixturevalue(name), classes if name == "llamagen" else pictures
    given = options(model, images, tmp_path / "out", steps=1, learning_rate=0.0, warmup_steps=0)
    prices = finetune(given)["validation_loss_by_strategy"]
    found = find_model(str(model))
    _, held_out = read_images(given, found)
    assert held_out is not None
    world = diagd.VideoGenerator.from_pretrained(model, dtype="float32")
    tokens = held_out.tokens.long().view(1, 1, world.height, world.width)
    for strategy, price in prices.items():
        text, ids = held_out.prompts[0][None], None
        if name == "llamagen":
            text, ids = None, held_out.prompts[0].view(1, 1, 1)
        how = {"prefix": text, "row_ends": name == "emu3"}
        nll = strategy_nll(world.model, tokens, ids, parse_strategy(strategy), 0, **how)
        assert price == pytest.approx(nll.mean().item(), abs=1e-4)


def test_cards_of_gymnasium_are_learned_by_rank(tmp_path):
    """Its 48 pictures of playing cards; four are held out."""
    model = write_llamagen(tmp_path / "model")
    (model.parent / "config.json").write_text('{"image_size": 64}')
    folder = Path(gymnasium.__file__).parent / "envs" / "toy_text" / "img" / "blackjack"
    cards = sorted(folder.glob("card_??.png"))
    assert len(cards) == 48
    ranks = {rank: number for number, rank in enumerate("23456789JQKA")}
    for card in cards:
        rank, suit = card.stem[-2:]
        there = tmp_path / "cards" / str(ranks[rank])
        there.mkdir(parents=True, exist_ok=True)
        shutil.copy(card, there / f"{suit}.png")
    given = options(model, tmp_path / "cards", tmp_path / "out", steps=60, batch_size=8)
    assert finetune(given)["validation_loss"] < 0.6 * math.log(NUM_CODES)


def test_texts_are_left_out_at_the_rate_asked_for(janus, pictures, tmp_path):
    found = find_model(str(janus))
    for drop, share in ((None, 0.1), (0.5, 0.5), (0.0, 0.0)):
        images, _ = read_images(options(janus, pictures, tmp_path / "out", drop=drop), found)
        empty = [prompt.tolist() for prompt in images.unconditional]
        size = images.tokens.shape[1]
        drawn = [row[:-size].tolist() for seed in range(40) for row in images.draw(8, seed)]
        assert sum(one in empty for one in drawn) / len(drawn) == pytest.approx(share, abs=0.12)


def test_a_killed_run_resumes_to_the_same_bits_and_tokenizes_nothing_twice(
    janus, pictures, tmp_path, monkeypatch
):
    whole = options(janus, pictures, tmp_path / "whole", steps=6, save_minutes=0.0)
    finetune(whole)
    monkeypatch.setattr("diagd.data.captioned.Captioned.read", None)
    killed = options(janus, pictures, tmp_path / "killed", steps=6, save_minutes=0.0)
    run_killed(finetune, killed, 3)
    finetune(killed)
    assert_same_run(killed.out, whole.out)


def test_a_folder_of_ours_is_finetuned_as_well(janus, pictures, command, tmp_path):
    assert command("convert", janus, tmp_path / "ours").code == 0
    done = command(*flags_of(tmp_path / "ours", pictures, tmp_path / "out"))
    assert done.code == 0, done
    assert "2 pictures, 10% of the time without what they show" in done.said
    assert (tmp_path / "out" / "text" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        (lambda folder: (folder / "1.txt").unlink(), (), r"text of a picture not found: .*1\.txt"),
        (lambda folder: (folder / "2.png").write_bytes(b"torn"), (), r"2\.png"),
        (lambda folder: noise(0, (4, 6)).save(folder / "0.png"), (), r"0\.png: expected at least"),
        (lambda folder: (folder / "0.txt").write_text("a " * 200), (), r"0\.png: text must be at"),
        (lambda folder: None, ("--frames", 3), "frames is for clips: leave it out with images"),
        (lambda folder: None, ("--drop", 1), r"drop must be in \[0, 1\), got 1"),
    ],
)
def test_mistakes_are_told_in_one_line(spoil, more, message, janus, pictures, command, tmp_path):
    spoil(pictures)
    out = tmp_path / "out"
    command(*flags_of(janus, pictures, out, *more)).assert_refused(message)
    assert not out.exists()


def test_models_and_folders_that_do_not_fit_are_refused(
    janus, llamagen, pictures, classes, command, tmp_path
):
    out = tmp_path / "out"
    (classes / "dog").mkdir()
    noise(9).save(classes / "dog" / "9.png")
    refused = command(*flags_of(llamagen, classes, out))
    refused.assert_refused(r"9\.png: unknown class 'dog', expected class 0 to class 999")
    refused = command(*flags_of("maze", pictures, out))
    refused.assert_refused("images are for image models; maze continues clips")
    plain = "finetune", "--init", "maze", "--out", out
    command(*plain).assert_refused("give --tokens, or --images for an image model")
    command(*plain, "--tokens", out, "--drop", 0.5).assert_refused("drop is only for --images")
    assert not out.exists()


def test_an_adapter_learns_pictures_beside_a_frozen_model(janus, pictures, command, tmp_path):
    out = tmp_path / "out"
    report = finetune(options(janus, pictures, out, steps=60, lora=4, drop=0.0))
    losses = [line["loss"] for line in log_of(out)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert not (out / "model.safetensors").exists()
    assert set(report["validation_loss_by_strategy"]) == {"raster", "k=1"}
    flags = "--adapter", out, "--text", WORDS[0], "--output", tmp_path / "a.png"
    made = command("generate", "--model", janus, *flags)
    assert made.code == 0, made
