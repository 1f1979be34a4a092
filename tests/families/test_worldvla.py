"""WorldVLA in miniature: Chameleon's class, asked anew for every frame, as in its makers' code."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_video
from diagd.families.chameleon.robots import SENTENCE, RobotActions
from diagd.families.checkpoints import find_model
from tests import oracles
from tests.families.images import check_converted, check_int8, raster_images
from tests.families.test_janus_chameleon import write_released
from tests.models.architectures import (
    BOS,
    FIRST_VISUAL,
    IMAGE_START,
    NUM_VISUAL,
    PAD,
    chameleon_of,
)
from tests.models.test_image_models import chameleon_words
from tests.models.tiny import random_tokens
from tests.worlds import smooth_frames

HEIGHT, WIDTH = 4, 6  # codes
IMAGE_END, ROW_END, ACTION_START, ACTION_END, TURN_END, TALL, WIDE = 2, 4, 5, 7, 8, 9, 34
WORDS = {word: 35 + place for place, word in enumerate(dict.fromkeys(SENTENCE[:-1].split()))}
FIRST_BIN = 60
NAMES = {
    "<eoss>": IMAGE_END,
    "<reserved08799>": ROW_END,
    "<reserved10000>": ACTION_START,
    "<reserved15000>": ACTION_END,
    "<reserved08706>": TURN_END,
    "<reserved08802>": TALL,
    "<reserved08803>": WIDE,
    **{f"<reserved{10002 + bin}>": FIRST_BIN + bin for bin in range(256)},
}
VISUAL = [*range(FIRST_VISUAL, FIRST_VISUAL + NUM_VISUAL), ROW_END]
SIZE = [IMAGE_START, TALL, WIDE]
GREEDY = diagd.SamplingOptions()
ACTIONS = ["move(0.1,0,-0.5,0.2,0,-0.3,1)", "none", "move(5,-5,0.3,0,0.1,0,-1)"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = chameleon_of(vocab_size=FIRST_BIN + 256).eval()
    model.model.vocabulary_mapping.image_tokens = []  # its forward bans no id
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    """Write it as its makers do, with the text tokenizer and Meta's VQ-GAN."""
    fast = chameleon_words({"<pad>": PAD, "<s>": BOS, "<unk>": 3, **WORDS, ".": 50})
    config = {"z_loss_weight": 0.0, "grid_height": HEIGHT, "grid_width": WIDTH}
    config["architectures"] = ["ChameleonXLLMXForConditionalGeneration_ck"]
    return write_released(tmp_path_factory.mktemp("worldvla"), theirs, NAMES, fast, **config)


@pytest.fixture(scope="module")
def world(folder) -> diagd.VideoGenerator:
    return diagd.VideoGenerator.from_pretrained(folder)


def bins_of(numbers):
    """Their `process_action`, of the ranges in their `norm_action`."""
    low = np.array([-0.9375, -0.9375, -0.9375, -0.32571429, -0.375, -0.375, -1.0])
    high = np.array([0.9375, 0.9375, 0.9375, 0.375, 0.375, 0.375, 1.0])
    scaled = np.clip(2 * (np.array(numbers) - low) / (high - low + 1e-8) - 1, -1, 1)
    edges = np.linspace(-1, 1, 256)
    return [FIRST_BIN + int((edges <= number).sum()) - 1 for number in scaled]


def prompt_of(images, action, sentence=SENTENCE, words=WORDS):
    """What a frame is asked for with, (1, P) of their ids; those of `images` are theirs as well."""
    numbers = [0, 0, 0, 0, 0, 0, -1]
    if action != "none":
        numbers = [float(number) for number in action[5:-1].split(",")]
    said = [words[word] for word in sentence[:-1].split()] + [50]
    shown = [id for rows in images for id in [*SIZE, *rows.flatten().tolist(), IMAGE_END]]
    order = [ACTION_START, *bins_of(numbers), ACTION_END]
    return torch.tensor([[BOS, *said, *shown, *order, TURN_END, *SIZE]])


def costs_of(theirs, prompt, targets):
    """Nats of each of (1, L) tokens behind a prompt, among all ids that we have columns for."""
    with torch.no_grad():
        whole = torch.cat([prompt, targets], 1)
        logits = theirs(whole, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    signs = [IMAGE_END, ACTION_START, ACTION_END, TURN_END]
    columns = [*VISUAL, *SIZE, *signs, *range(FIRST_BIN, FIRST_BIN + 256)]
    return logits[:, columns].logsumexp(-1) - logits.gather(1, targets.T)[:, 0]


def to_theirs(tokens):
    return torch.tensor(VISUAL)[tokens]


@pytest.mark.proves("WorldVLA", "logits")
@torch.no_grad()
def test_logits_are_those_of_the_class(theirs, world):
    """Over a whole prompt and the frame behind it."""
    rows = random_tokens(2, HEIGHT, WIDTH + 1, vocab_size=NUM_VISUAL)
    rows[..., -1] = NUM_VISUAL
    sequence = torch.cat(
        [prompt_of(to_theirs(rows[:1]), ACTIONS[0]), to_theirs(rows[1:]).flatten(1)], 1
    )
    ids = world.action_ids(ACTIONS[:1], 1, "frame")
    assert ids is not None
    prefix = torch.arange(world.config.prefix_length)[None] + world.config.vocab_size
    ours = torch.cat([prefix, rows[:1].flatten(1), ids[0], rows[1:].flatten(1)], 1)
    expected = theirs(sequence, use_cache=False).logits[..., VISUAL]
    model: Any = world.model
    logits = diagd.load_model(world.source.name_or_path).logits(ours)[..., : NUM_VISUAL + 1]
    assert model.num_embeddings == world.config.vocab_size + world.config.prefix_length
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.proves("WorldVLA", "native", "raster")
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_raster_order_asks_anew_for_every_frame(theirs, folder, backend):
    world = diagd.VideoGenerator.from_pretrained(folder, backend=backend)
    frame = smooth_frames(1, *world.frame_size_px)
    video = world.generate(frame, ACTIONS, strategy="raster")
    rows, expected = to_theirs(world.tokenizer.encode(frame)[0]), []
    for action in ACTIONS:
        prompt = prompt_of([rows], action)
        (rows,) = raster_images(theirs, prompt, prompt, 1, VISUAL, HEIGHT, WIDTH)
        expected.append(rows)
    assert torch.equal(to_theirs(video.tokens), torch.stack(expected))
    assert len(video.tokens.unique()) > 4


def choose(logits, _frame, _row, column):
    """Draw greedily, among images and the end of a row in its place."""
    chosen = logits[:, VISUAL[:-1]].argmax(-1) + FIRST_VISUAL
    return torch.full_like(chosen, ROW_END) if column == WIDTH else chosen


@pytest.mark.proves("WorldVLA", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2])
def test_diagonals_are_those_of_a_decoder_without_a_cache(theirs, world, row_lag):
    frame = smooth_frames(1, *world.frame_size_px, seed=1)
    video = world.generate(frame, ACTIONS, strategy=f"k={row_lag}")
    rows = to_theirs(world.tokenizer.encode(frame)[0])
    for action, tokens in zip(ACTIONS, video.tokens, strict=True):
        reference = oracles.ReferenceStream(
            oracles.chameleon_logits(theirs),
            prompt_of([rows], action),
            *(HEIGHT, WIDTH + 1),
            sample_fn=choose,
            row_ends=[ROW_END] * HEIGHT,
        )
        frame_lag = (HEIGHT - 1) * row_lag + WIDTH + 1
        rows = reference.decode(1, row_lag, frame_lag)[0, 0]
        assert torch.equal(to_theirs(tokens), rows)


@pytest.mark.proves("WorldVLA", "int8")
def test_int8_keeps_close_to_float32(folder):
    check_int8(folder)


@pytest.mark.proves("WorldVLA", "pixels")
def test_frames_are_painted_and_a_folder_of_ours_makes_the_same(world, folder, command, tmp_path):
    """Its tokenizer is Chameleon's, which has a test of its own."""
    frame = smooth_frames(1, *world.frame_size_px)
    video = world.generate(frame, ACTIONS)
    assert video.frames.shape == (3, 2 * HEIGHT, 2 * WIDTH, 3)
    check_converted(command, folder, tmp_path / "ours", video, frame, ACTIONS)


@pytest.mark.proves("WorldVLA", "evaluate")
def test_clips_are_continued_and_priced(theirs, world, folder, command, tmp_path):
    """A clip of two frames costs what it does their class; of a longer one it sees two at once."""
    frames, size = smooth_frames(3, *world.frame_size_px), (HEIGHT, WIDTH + 1)
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", frames, fps=20)
    write_actions(tmp_path / "clips" / "a.jsonl", ["none", ACTIONS[0], ACTIONS[2]])
    clips = "--model", folder, "--clips", tmp_path / "clips", "--num-clips", 1, "--strategy", "k=1"
    flags = *clips, "--out", tmp_path / "out", "--temperature", 0, "--json"
    outcome = command("evaluate", *flags, "--frames", 3)
    assert outcome.code == 0, outcome.err
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    assert rows["k=1"]["num_steps"] == 2 * (HEIGHT + WIDTH)
    priced = command("evaluate", *flags, "--frames", 2, "--teacher-forced")
    assert priced.code == 0, priced.err
    rows = {row["strategy"]: row for row in priced.document["rows"]}
    seen = to_theirs(world.tokenizer.encode(read_video(tmp_path / "clips" / "a.mp4").frames))
    costs = costs_of(theirs, prompt_of(seen[:1], ACTIONS[0]), seen[1].view(1, -1))
    expected = costs.view(size)[:, :-1].mean().item()
    assert rows["raster"]["nll"] == pytest.approx(expected, abs=1e-3)
    assert rows["k=1"]["gap"] != 0
    longer = command("evaluate", *clips, "--out", tmp_path / "b", "--frames", 3, "--teacher-forced")
    longer.assert_refused("sees 86 tokens at once, and the clip has 128: lower --frames")


def test_actions_are_seven_numbers():
    codec = RobotActions()
    assert codec.action_of({"action": [0.1, 0, 0, 0, 0, 0, 1]}) == "move(0.1,0,0,0,0,0,1)"
    assert codec.action_of({"action": "none"}) == "none"
    assert codec.tokens_of("none") == codec.tokens_of("move(0,0,0,0,0,0,-1)")
    assert codec.tokens_of("move(9,9,9,9,9,9,9)")[2:9] == (262,) * 7
    assert codec.tokens_of("move(-9,-9,-9,-9,-9,-9,-9)")[2:9] == (7,) * 7
    for action in ("move(1,2)", "move(1,2,3,4,5,6,nan)", "move(a,2,3,4,5,6,7)", "jump"):
        with pytest.raises(ValueError, match=r"unknown action '.*', expected none or move\(X,Y"):
            codec.tokens_of(action)
    with pytest.raises(ValueError, match=r'expected \{"action": WORDS or 7 NUMBERS\}, got \{"act'):
        codec.action_of({"action": 3})


def test_a_picture_to_go_on_from_is_asked_for(folder, command):
    refused = command("generate", "--model", folder, "--actions", "none")
    refused.assert_refused(r"prompt not found: .*prompt\.mp4, give --prompt")
    refused = command("attention", "--model", folder)
    refused.assert_refused("sequences that begin with a frame, which those of .* do not")


def test_its_text_tokenizer_has_to_be_there(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"text tokenizer not found: .*tokenizer\.json"):
        find_model(tmp_path)


def test_a_text_tokenizer_of_other_software_is_one_line(folder, tmp_path):
    """The library that parses it raises `Exception` itself."""
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(words | {"model": {"type": "of 2030"}}))
    message = r"WorldVLA checkpoint: text tokenizer cannot be loaded: \w"
    with pytest.raises(ValueError, match=message):
        find_model(tmp_path)
