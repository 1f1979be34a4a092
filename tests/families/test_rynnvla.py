"""RynnVLA-002 in miniature: Chameleon's class, asked for two images, as in its makers' code."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_image, write_video
from diagd.families.chameleon.robots import SENTENCE_OF_TWO
from diagd.families.checkpoints import find_model
from tests import oracles
from tests.families import test_worldvla as one_camera
from tests.families.images import check_converted, check_int8, raster_images
from tests.families.test_worldvla import (
    ACTIONS,
    HEIGHT,
    IMAGE_END,
    ROW_END,
    SIZE,
    VISUAL,
    WIDTH,
    choose,
    costs_of,
    to_theirs,
)
from tests.worlds import smooth_frames

theirs, folder_of_one = one_camera.theirs, one_camera.folder
SEAM = [IMAGE_END, *SIZE]
WORDS = {word: 20 + place for place, word in enumerate(dict.fromkeys(SENTENCE_OF_TWO[:-1].split()))}


@pytest.fixture(scope="module")
def folder(theirs, folder_of_one, tmp_path_factory):
    """That of WorldVLA with an action head, whose weights are read by nobody here."""
    path = shutil.copytree(folder_of_one, tmp_path_factory.mktemp("rynnvla") / "model")
    write_head(theirs, path, 7)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["ChameleonXLLMXForConditionalGeneration_ck_action_head"]
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= WORDS
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def write_head(theirs, path, size):
    """Write the weights with what of an action head tells how many numbers an action has."""
    head = "action_head.output_projection.model.fc2.bias", "action_head.hidden_projection.bias"
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    save_file(
        tensors | {head[0]: torch.zeros(size), head[1]: torch.zeros(3)}, path / "model.safetensors"
    )


@pytest.fixture(scope="module")
def world(folder) -> diagd.VideoGenerator:
    return diagd.VideoGenerator.from_pretrained(folder)


def prompt_of(images, action):
    return one_camera.prompt_of(images, action, SENTENCE_OF_TWO, WORDS)


def stacked(count, world, seed=0):
    return smooth_frames(count, *world.frame_size_px, seed=seed)


def cameras(world, frame):
    """Their ids of the images of one frame, each (HEIGHT, WIDTH + 1), the third person's first."""
    upper, lower = frame.tensor_split(2, 1)
    codes = [world.tokenizer.tokenizer.encode(half) for half in (upper, lower)]
    return [to_theirs(rows[0]) for rows in codes]


@pytest.mark.proves("RynnVLA-002", "logits")
@torch.no_grad()
def test_logits_are_those_of_the_class(theirs, world):
    """Over a whole prompt; the order of the tokens is the makers'."""
    frame = stacked(1, world)
    prompt, _ = world.prompt(frame, [])
    ids = world.action_ids(ACTIONS[:1], 1, "frame")
    assert ids is not None
    ours = torch.cat([prompt, ids[0, :, :14]], 1)
    expected = theirs(prompt_of(cameras(world, frame), ACTIONS[0]), use_cache=False).logits
    logits = diagd.load_model(world.source.name_or_path).logits(ours)[..., : len(VISUAL)]
    torch.testing.assert_close(logits, expected[..., VISUAL], atol=1e-4, rtol=0)


@pytest.mark.proves("RynnVLA-002", "native", "raster")
def test_raster_order_asks_anew_for_every_frame(theirs, folder):
    backends = "eager", "native"
    worlds = [diagd.VideoGenerator.from_pretrained(folder, backend=name) for name in backends]
    frame = stacked(1, worlds[0])
    video, other = (world.generate(frame, ACTIONS, strategy="raster") for world in worlds)
    assert torch.equal(video.tokens, other.tokens)
    images, size = cameras(worlds[0], frame), (HEIGHT, WIDTH)
    for action, tokens in zip(ACTIONS, video.tokens, strict=True):
        sequence, images = prompt_of(images, action), []
        for _ in range(2):
            images += raster_images(theirs, sequence, sequence, 1, VISUAL, *size)
            written = images[-1].flatten().tolist() + SEAM
            sequence = torch.cat([sequence, torch.tensor([written])], 1)
        assert torch.equal(to_theirs(tokens), torch.cat(images))
    assert len(video.tokens.unique()) > 4


@pytest.mark.parametrize("strategy", ["exact", "exact,lanes=12", "jacobi"])
def test_exact_strategies_write_what_raster_order_does(world, strategy):
    frame, sampling = stacked(1, world), diagd.SamplingOptions(temperature=1.0)
    given = {"sampling": sampling, "seed": 3}
    raster = world.generate(frame, ACTIONS[:2], strategy="raster", **given)
    exact = world.generate(frame, ACTIONS[:2], strategy=strategy, **given)
    assert torch.equal(exact.tokens, raster.tokens)
    assert exact.stats.num_steps < raster.stats.num_steps


@pytest.mark.proves("RynnVLA-002", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 3])
def test_diagonals_are_those_of_a_decoder_without_a_cache(theirs, world, row_lag):
    frame = stacked(1, world, seed=1)
    video = world.generate(frame, ACTIONS, strategy=f"k={row_lag}")
    images, frame_lag = cameras(world, frame), (2 * HEIGHT - 1) * row_lag + WIDTH + 1
    for action, tokens in zip(ACTIONS, video.tokens, strict=True):
        reference = oracles.ReferenceStream(
            oracles.chameleon_logits(theirs),
            prompt_of(images, action),
            *(2 * HEIGHT, WIDTH + 1),
            num_action_tokens=4,
            sample_fn=choose,
            row_ends=[ROW_END] * 2 * HEIGHT,
            num_seam_tokens=4,
        )
        rows = reference.decode(1, row_lag, frame_lag, torch.tensor([[SEAM]]))[0, 0]
        assert torch.equal(to_theirs(tokens), rows)
        images = rows.chunk(2)
    assert video.stats.num_steps == 3 * frame_lag


@pytest.mark.proves("RynnVLA-002", "int8")
def test_int8_keeps_close_to_float32(folder):
    check_int8(folder)


@pytest.mark.proves("RynnVLA-002", "pixels")
def test_cameras_are_painted_apart_and_a_folder_of_ours_makes_the_same(
    world, folder, command, tmp_path
):
    frame = stacked(1, world)
    video = world.generate(frame, ACTIONS)
    assert video.frames.shape == (3, 4 * HEIGHT, 2 * WIDTH, 3)
    for half, tokens in zip(video.frames.chunk(2, 1), video.tokens.chunk(2, 1), strict=True):
        assert torch.equal(world.tokenizer.tokenizer.decode(tokens), half)
    ours = check_converted(command, folder, tmp_path / "ours", video, frame, ACTIONS)
    stream = list(ours.stream(frame, ACTIONS, strategy="k=1"))
    assert torch.equal(torch.stack(stream), ours.generate(frame, ACTIONS, strategy="k=1").frames)


@pytest.mark.proves("RynnVLA-002", "evaluate")
def test_a_clip_costs_what_it_does_their_class(theirs, world, folder, command, tmp_path):
    frames = stacked(2, world)
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", frames, fps=20)
    write_actions(tmp_path / "clips" / "a.jsonl", ["none", ACTIONS[0]])
    flags = "--model", folder, "--clips", tmp_path / "clips", "--num-clips", 1, "--strategy", "k=1"
    flags = *flags, "--out", tmp_path / "out", "--frames", 2, "--teacher-forced", "--json"
    priced = command("evaluate", *flags)
    assert priced.code == 0, priced.err
    rows = {row["strategy"]: row for row in priced.document["rows"]}
    seen = read_video(tmp_path / "clips" / "a.mp4").frames
    before, after = (cameras(world, seen[i : i + 1]) for i in (0, 1))
    prompt = prompt_of(before, ACTIONS[0])
    targets = torch.cat([torch.tensor(SEAM).expand(1, -1), after[1].view(1, -1)], 1)
    targets = torch.cat([after[0].view(1, -1), targets], 1)
    costs = costs_of(theirs, prompt, targets)
    size = HEIGHT * (WIDTH + 1)
    images = torch.stack([costs[:size], costs[size + len(SEAM) :]]).view(2, HEIGHT, WIDTH + 1)
    assert rows["raster"]["nll"] == pytest.approx(images[..., :-1].mean().item(), abs=1e-3)
    assert rows["k=1"]["gap"] != 0


def test_a_picture_of_one_camera_and_other_robots_are_refused(theirs, folder, command, tmp_path):
    picture = tmp_path / "view.png"
    write_image(picture, smooth_frames(1, 2 * HEIGHT, 2 * WIDTH)[0])
    refused = command("generate", "--model", folder, "--prompt", picture, "--frames", 1)
    refused.assert_refused(r"pictures of two cameras, .* 12x16 pixels .*, got 12x8")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_head(theirs, tmp_path, 6)
    with pytest.raises(ValueError, match="actions must be LIBERO's 7 numbers, got 6"):
        find_model(tmp_path)
