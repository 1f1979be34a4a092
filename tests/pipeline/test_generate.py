import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.recorders.doom import ACTIONS, WALKING
from diagd.data.video import contact_sheet, read_video, save_frames, write_image
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.families.checkpoints import model_path, save_model
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.tokenizers.vq import VQTokenizer
from tests.data.encoding import encode_video
from tests.worlds import (
    HEIGHT,
    HEIGHT_PX,
    NUM_CODES,
    WIDTH,
    WIDTH_PX,
    model_config,
    random_model,
    smooth_frames,
    write_world,
)

FRAMES = 4
CONTEXT = 3


@pytest.fixture
def generate(command, world, tmp_path, monkeypatch):
    """Run `diagd generate` on the tiny world, into an empty folder which is also where we are."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)

    def run(*flags, model=world):
        base = ("--model", model, "--frames", FRAMES, "--context-frames", CONTEXT)
        return command("generate", *base, *flags, "--json")

    return run


@pytest.fixture
def refused(generate, tmp_path):
    """Run a command that must fail with a message and leave the folder as empty as it was."""

    def run(message, *flags, **options):
        before = sorted(path.name for path in (tmp_path / "out").iterdir())
        generate(*flags, **options).assert_refused(message)
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before

    return run


@pytest.fixture
def broken_world(world, tmp_path):
    """Return a copy of the world, to be damaged."""
    return shutil.copytree(world, tmp_path / "broken")


def steps(num_frames, row_lag=1, frame_lag=None):
    grid = TokenGrid(num_frames, HEIGHT, WIDTH)
    if frame_lag is None:
        return DiagonalSchedule.spatial(grid, row_lag).num_steps
    return DiagonalSchedule(grid, row_lag, frame_lag).num_steps


def dreamt(video_path):
    return read_video(video_path).frames[CONTEXT:]


def test_without_flags_a_video_a_sheet_and_a_report_are_made(generate, world, tmp_path):
    outcome = generate()
    assert outcome.code == 0, outcome.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["dream.mp4", "dream.png"]
    document = outcome.document
    assert (document["output"], document["contact_sheet"]) == ("dream.mp4", "dream.png")
    raster, same, diagonal = document["runs"]
    assert (raster["strategy"], diagonal["strategy"]) == ("raster", "k=1")
    assert (same["strategy"], same["num_frames"], same["num_steps"]) == ("k=1", 2, steps(2))
    assert (raster["num_frames"], diagonal["num_frames"]) == (2, FRAMES)
    assert (raster["num_steps"], diagonal["num_steps"]) == (2 * HEIGHT * WIDTH, steps(FRAMES))
    assert diagonal["tokens_per_second"] == pytest.approx(
        FRAMES * HEIGHT * WIDTH / diagonal["seconds"]
    )
    assert (raster["speedup"], diagonal["speedup"]) == (1, None)  # on equal work only
    assert same["speedup"] == pytest.approx(raster["seconds"] / same["seconds"])
    opening, size = outcome.err.splitlines()[0], f"{HEIGHT_PX}x{WIDTH_PX}"
    expected = rf"{FRAMES} frames of {size} px, k=1, (under a second|about \d+ s here)"
    assert re.fullmatch(rf".* on cpu, 1 threads, (float32|bfloat16): {expected}", opening)
    assert 0 <= diagonal["tokens_equal_to_raster"] <= 1
    for word in ("steps", "tokens/s", "frames/s", "wrote dream.mp4 and dream.png"):
        assert word in outcome.said
    video, prompt = read_video("dream.mp4"), read_video(world / "prompt.mp4")
    assert video.frames.shape == (CONTEXT + FRAMES, HEIGHT_PX, WIDTH_PX, 3)
    assert video.fps == prompt.fps
    # the clip's last frames, once more through the codec; its other frames are far away
    assert psnr(video.frames[:CONTEXT], prompt.frames[-CONTEXT:]).min() > 25
    sheet = read_video("dream.png").frames
    assert sheet.shape == (1, 2 * (HEIGHT_PX + 4) + 4, 5 * (WIDTH_PX + 4) + 4, 3)
    assert torch.equal(sheet[0, 4 : 4 + HEIGHT_PX, 4 : 4 + WIDTH_PX], prompt.frames[-CONTEXT])


def test_a_terminal_shows_how_many_frames_there_are(generate, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    outcome = generate()
    assert outcome.code == 0, outcome.err
    assert re.search(rf"generating {FRAMES} frames, k=1 .*{FRAMES}/{FRAMES}, ", outcome.said)


@pytest.mark.parametrize("flag", ["--out", "--output"])
def test_one_video_goes_to_out_as_in_every_other_command(flag, generate):
    assert generate(flag, "here.mp4").document["output"] == "here.mp4"
    assert len(read_video("here.mp4").frames) == CONTEXT + FRAMES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-k", WIDTH + 1), rf"row_lag must be in \[1, width={WIDTH}\], got {WIDTH + 1}"),
        (("--actions", "jump"), "unknown action 'jump'"),
        (("--actions", "walk.jsonl"), r"action file not found: walk\.jsonl"),
        (("--prompt", "absent.mp4"), r"video not found: absent\.mp4"),
    ],
)
def test_what_needs_no_weights_is_refused_before_they_are_read(
    flags, message, refused, monkeypatch
):
    monkeypatch.delattr(VideoGenerator, "from_pretrained")
    refused(message, *flags)


def test_a_folder_without_a_model_is_named(refused, tmp_path):
    (tmp_path / "none").mkdir()
    expected = r"expected a folder with config\.json and model\.safetensors, or a released"
    refused(rf"none: no model, {expected}", model=tmp_path / "none")


def test_raster_alone_is_one_row(generate):
    (row,) = generate("--strategy", "raster").document["runs"]
    assert (row["strategy"], row["num_frames"]) == ("raster", FRAMES)
    assert row["num_steps"] == FRAMES * HEIGHT * WIDTH


def test_compare_shows_raster_on_the_left_and_the_diagonal_on_the_right(generate):
    document = generate("--compare", "--row-lag", 2).document
    assert [row["num_frames"] for row in document["runs"]] == [FRAMES, FRAMES]
    assert [row["num_steps"] for row in document["runs"]] == [
        FRAMES * HEIGHT * WIDTH,
        steps(FRAMES, row_lag=2),
    ]
    both = read_video("dream.mp4").frames
    assert both.shape == (CONTEXT + FRAMES, HEIGHT_PX, 2 * WIDTH_PX, 3)
    assert read_video("dream.png").frames.shape[1] == 2 * (2 * (HEIGHT_PX + 4) + 4)
    assert generate("--strategy", "raster", "--output", "raster.mp4").code == 0
    assert generate("-k", 2, "--output", "diagonal.mp4").code == 0
    left, right = both[CONTEXT:].split(WIDTH_PX, dim=2)
    raster, diagonal = dreamt("raster.mp4"), dreamt("diagonal.mp4")
    # the codec treats a video and its half a little differently; greedy dreams part for good
    assert psnr(left, raster)[-1] > psnr(left, diagonal)[-1] + 5
    assert psnr(right, diagonal)[-1] > psnr(right, raster)[-1] + 5


def test_exact_writes_what_raster_writes_in_fewer_steps(generate):
    document = generate("--strategy", "exact", "--compare").document
    raster, exact = document["runs"]
    assert (raster["strategy"], exact["strategy"]) == ("raster", "exact")
    assert exact["tokens_equal_to_raster"] == 1
    assert exact["num_steps"] < raster["num_steps"]
    assert raster["num_fed"] == FRAMES * (HEIGHT * WIDTH + 1)  # an action a frame


def test_frames_can_overlap(generate):
    document = generate("-k", 1, "-d", 2).document
    assert document["runs"][-1]["num_steps"] == steps(FRAMES, 1, 2) < steps(FRAMES)


def test_seed_temperature_and_top_k_reach_the_draws(generate):
    flags = {
        **{"a": ("--seed", 7), "b": ("--seed", 7), "c": ("--seed", 8), "top": ("--top-k", 1)},
        **{f"greedy-{seed}": ("--temperature", 0, "--seed", seed) for seed in (1, 2)},
    }
    for name, given in flags.items():
        assert generate(*given, "--output", f"{name}.mp4").code == 0
    a, b, c, top, greedy, other = (dreamt(f"{name}.mp4") for name in flags)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(greedy, other)
    assert torch.equal(greedy, top)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_lower_precision_is_what_the_pipeline_writes_in_it(dtype, generate, world):
    outcome = generate("--dtype", dtype, "--temperature", 0, "--raster-frames", 0)
    assert f"threads, {dtype}" in outcome.said
    rounded = VideoGenerator.from_pretrained(
        world, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32, int8=dtype == "int8"
    )
    assert rounded.vocabulary is not None
    actions = read_actions(world / "prompt.jsonl", rounded.vocabulary)
    walk = read_actions(world / "walk.jsonl", rounded.vocabulary)
    context = read_video(world / "prompt.mp4").frames[-CONTEXT:]
    video = rounded.generate(
        context,
        [walk[frame % len(walk)] for frame in range(FRAMES)],
        FRAMES,
        context_actions=actions[1 - CONTEXT :],
        sampling=SamplingOptions(),
    )
    sheet = contact_sheet(torch.cat([context, video.frames]), columns=5)
    assert torch.equal(read_video("dream.png").frames[0], sheet)


def test_actions_are_a_string_or_a_file_and_lead_the_dream(generate, tmp_path):
    write_actions(tmp_path / "walk.jsonl", ["left", "left", "right", "none"])
    for name, actions in (
        ("string", "left*2,right,none"),
        ("file", tmp_path / "walk.jsonl"),
        ("other", "right*4"),
    ):
        outcome = generate("--actions", actions, "--output", f"{name}.mp4")
        assert outcome.code == 0
    string, file, other = (dreamt(f"{name}.mp4") for name in ("string", "file", "other"))
    assert torch.equal(string, file)
    assert not torch.equal(string, other)


def test_the_walk_of_the_folder_is_repeated_to_length(generate):
    assert generate("--output", "walk.mp4").code == 0  # forward, left, right of walk.jsonl
    assert generate("--actions", "forward,left,right,forward", "--output", "same.mp4").code == 0
    assert torch.equal(dreamt("walk.mp4"), dreamt("same.mp4"))


def test_the_actions_of_the_prompt_count(generate, broken_world):
    assert generate("--output", "a.mp4").code == 0
    write_actions(broken_world / "prompt.jsonl", ["none", "forward", "left", "left", "none"])
    assert generate("--output", "b.mp4", model=broken_world).code == 0
    write_actions(broken_world / "prompt.jsonl", ["left", "left", "left", "left", "right"])
    assert generate("--output", "c.mp4", model=broken_world).code == 0
    a, b, c = (dreamt(f"{name}.mp4") for name in "abc")
    assert not torch.equal(a, b)  # the last action differs
    assert torch.equal(a, c)  # the last two do not, and what came before is not seen


def test_a_dream_longer_than_the_context_drops_old_frames_and_says_so(generate):
    outcome = generate("--frames", 9, "--actions", "left*9")
    assert outcome.code == 0
    dropped = [row["num_dropped_frames"] for row in outcome.document["runs"]]
    assert dropped[-1] > dropped[0] == 0
    assert "the model looks back 7 frames, so later frames did not see the first" in outcome.said
    assert "prefilled" not in outcome.err  # one note is enough
    assert len(read_video("dream.mp4").frames) == CONTEXT + 9


def test_a_model_without_actions_dreams_without_them(generate, tmp_path):
    model = write_world(tmp_path / "still", num_action_tokens=0)
    assert generate(model=model).code == 0
    generate("--actions", "left*4", model=model).assert_refused("this model takes no actions")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--frame-lag", 0), r"frame_lag must be at least 1, got 0"),
        (("--frame-lag", 8), r"frame_lag must be in \[1, .*=7\], got 8"),
        (("--frames", 0), r"frames must be at least 1, got 0"),
        (("--frames", 2**40), r"1099511627776 frames would need .* GB, this machine has"),
        (("--context-frames", 0), r"context_frames must be at least 1, got 0"),
        (("--temperature", -1), r"temperature must be 0 or more, got -1"),
        (("--top-p", 2), r"top_p must be in \(0, 1\], got 2"),
        (("--top-k", 0), r"top_k must be an int of at least 1, got 0"),
        (("--seed", 2**64), r"seed must fit in 64 bits, got 18446744073709551616"),
        (("--strategy", "tolerance=0.5"), r"strategy tolerance=0.5 was removed"),
        (("--strategy", "k=1/first"), r"row_start must be one of .*'first'"),
        (
            ("--actions", "jump*4"),
            r"unknown action 'jump', expected one of: none, forward, left, r",
        ),
        (("--actions", "left*x"), r"actions must look like forward\*8,left\*4"),
        (("--actions", "left*5"), r"expected 4 actions \(one per frame\), got 5"),
        (("--model", "nowhere"), r"no model at 'nowhere': expected a folder with config\.json and"),
        (("--model", "mc-ar-42m"), r"'mc-ar-42m' is a preset without weights"),
    ],
)
def test_bad_flags_are_refused(flags, message, refused):
    refused(message, *flags)


def test_a_prompt_with_another_number_of_actions_is_refused(refused, world, tmp_path):
    shutil.copy(world / "prompt.mp4", tmp_path)
    write_actions(tmp_path / "prompt.jsonl", ["left"] * 4)
    message = r"prompt\.jsonl: expected 5 actions, got 4"
    refused(message, "--prompt", tmp_path / "prompt.mp4")


@pytest.mark.parametrize("name", ["ein Spaß.webm", "50%d: a.gif", "view 1.png", "Foto.JPG"])
def test_a_prompt_is_any_video_or_picture_of_any_size_and_name(name, generate, tmp_path):
    frames = smooth_frames(12, 50, 70)
    if name.endswith("webm"):
        encode_video(tmp_path / name, frames, 30, "libvpx-vp9")
    elif name.endswith("JPG"):
        Image.fromarray(frames[0].numpy()).save(tmp_path / name)
    else:
        save_frames(tmp_path / name, frames[: 1 if name.endswith("png") else 12], 20)
    outcome = generate("--prompt", tmp_path / name)
    assert outcome.code == 0, outcome.err
    out = " ".join(outcome.said.split())
    assert "pixels: centre-cropped and scaled to 24x40" in out
    is_video = name.endswith(("webm", "gif"))
    assert ("frames/s: resampled to the model's 8.75" in out) == is_video
    assert ("'none' inserted between its frames" in out) == is_video
    video = read_video("dream.mp4")
    assert len(video.frames) == (CONTEXT if is_video else 1) + FRAMES
    assert video.fps == Fraction(35, 4)


@pytest.mark.parametrize(
    ("actions", "spelled", "note"),
    [
        ("left", "left*4", None),
        ("right,left", "right,left*3", "2 actions for 4 frames: 'left' repeats to the end"),
    ],
)
def test_the_last_action_goes_on_until_the_frames_are_full(actions, spelled, note, generate):
    outcome = generate("--actions", actions, "--output", "short.mp4")
    assert ("repeats" in outcome.said) == bool(note)
    assert (note or "") in outcome.said
    assert "repeats" not in generate("--actions", spelled, "--output", "spelled.mp4").said
    assert torch.equal(dreamt("short.mp4"), dreamt("spelled.mp4"))


@pytest.mark.parametrize("name", ["dream.gif", "dream.webp", "dream.png"])
def test_the_output_is_what_its_name_says(name, generate, tmp_path):
    outcome = generate("--output", name)
    assert outcome.code == 0, outcome.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted({name, "dream.png"})
    assert outcome.document["output"] == name
    assert outcome.document["contact_sheet"] == "dream.png"
    with Image.open(name) as picture:
        shown = getattr(picture, "n_frames", 1)
    assert shown == (1 if name == "dream.png" else CONTEXT + FRAMES)


def test_a_prompt_shorter_than_the_context_asked_for_is_not_passed_over(generate):
    outcome = generate("--context-frames", 6)
    assert outcome.code == 0
    assert "prompt has 5 frames: the model sees all of them" in outcome.said
    assert len(read_video("dream.mp4").frames) == 5 + FRAMES


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "actions.json",
        "tokenizer/config.json",
        "tokenizer/diffusion_pytorch_model.safetensors",
        "prompt.mp4",
        "walk.jsonl",
    ],
)
def test_a_model_path_with_a_missing_file_names_it(name, refused, broken_world):
    (broken_world / name).unlink()
    refused(name.replace(".", r"\."), model=broken_world)


WEIGHTS = ["model.safetensors", "tokenizer/diffusion_pytorch_model.safetensors"]


def edit_config(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "config.json",
            {"hidden_size": 40},
            r"model\.safetensors: does not match .*\(expected \(",
        ),
        (
            "config.json",
            {"num_layers": 3},
            r"model\.safetensors: does not match .* missing tensors",
        ),
        (
            "config.json",
            {"image_vocab_size": 21},
            r"the model has 21 visual ids, but its tokenizer 20",
        ),
        ("config.json", {"num_action_tokens": 2}, r"actions\.json names 4 action ids and 1 "),
        (
            "tokenizer/config.json",
            {"latent_channels": 6},
            r"does not match the config: .*, got \(",
        ),
        ("actions.json", {"names": ["none"]}, r"actions\.json names 1 action ids and 1 tok"),
    ],
)
def test_a_config_of_another_shape_is_refused(name, changes, message, refused, broken_world):
    edit_config(broken_world / name, **changes)
    refused(message, model=broken_world)


def test_a_tokenizer_of_another_codebook_is_refused(refused, broken_world):
    small = VQTokenizer.from_pretrained(broken_world / "tokenizer")
    edit_config(broken_world / "tokenizer/config.json", num_vq_embeddings=NUM_CODES - 1)
    weights = load_file(broken_world / WEIGHTS[1])
    weights["quantize.embedding.weight"] = small.codebook[:-1].half()
    save_file(weights, broken_world / WEIGHTS[1])
    refused(r"the model has 20 visual ids, but its tokenizer 19 codes", model=broken_world)


def test_a_context_that_does_not_fit_the_model_is_refused(refused, broken_world):
    config = replace(model_config(), max_positions=3 * (HEIGHT * WIDTH + 1))
    save_model(random_model(config), broken_world)
    message = r"prompt and one frame need 63 slots, the context holds 48"
    refused(message, "--context-frames", 3, model=broken_world)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(refused, monkeypatch):
    def load_nothing(*_args, **_kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(VideoGenerator, "from_pretrained", load_nothing)
    message = r"output folder does not exist: nowhere"
    refused(message, "--output", "nowhere/dream.mp4")
    refused(
        r"output must end in \.mp4, \.gif, \.webp, \.png, got dream\.avi", "--output", "dream.avi"
    )


@pytest.mark.parametrize("name", ["dream.mp4", "dream.png"])
def test_an_output_that_is_a_folder_is_refused_before_the_work(name, refused, tmp_path):
    (tmp_path / "out" / name).mkdir()
    refused(rf"{name} is a folder, expected a file name")


@pytest.mark.parametrize("output", ["a/photo.mp4", "a/photo.png", "b/photo.gif"])
def test_a_prompt_is_never_overwritten_by_its_dream_or_the_sheet(output, refused, tmp_path):
    (tmp_path / "out" / "a").mkdir()
    (tmp_path / "out" / "b").symlink_to("a")
    write_image("a/photo.png", smooth_frames(1, 50, 70)[0])
    before = (tmp_path / "out" / "a" / "photo.png").read_bytes()
    refused(
        r"output would overwrite the prompt .*photo\.png",
        "--prompt",
        "a/photo.png",
        "--output",
        output,
    )
    assert (tmp_path / "out" / "a" / "photo.png").read_bytes() == before


def test_a_name_with_brackets_is_printed_as_it_is(generate):
    assert (
        "wrote a[b].mp4 and a[b].png"
        in generate("--strategy", "raster", "--output", "a[b].mp4").said
    )


def test_an_empty_walk_is_refused(refused, broken_world):
    (broken_world / "walk.jsonl").write_text("")
    refused(r"expected 4 actions \(one per frame\), got 0", model=broken_world)


@pytest.mark.parametrize(("name", "actions"), [("doom", ACTIONS), ("maze", WALKING)])
def test_a_bundled_world_is_small_and_knows_the_actions_of_the_recorder(name, actions):
    folder = model_path(name)
    sizes = [path.stat().st_size for path in folder.rglob("*")]
    assert sum(sizes) < 30e6
    assert max(sizes) < 25e6
    vocabulary = ActionVocabulary.load(folder / "actions.json")
    assert vocabulary == actions
    prompt = read_video(folder / "prompt.mp4").frames
    assert prompt.shape[1:] == (112, 192, 3)
    assert len(read_actions(folder / "prompt.jsonl", vocabulary, len(prompt))) >= 4
    assert len(read_actions(folder / "walk.jsonl", vocabulary)) >= 16


def test_the_bundled_model_dreams_something_that_moves_on_from_its_prompt(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    outcome = command("generate", "--frames", 1, "--json")
    assert outcome.code == 0, outcome.err
    assert [row["num_steps"] for row in outcome.document["runs"]] == [14 * 24, 13 + 24]
    frames = read_video("dream.mp4").frames
    assert frames.shape == (5, 112, 192, 3)
    assert psnr(frames[4], frames[3]) > 12  # a view like the last one, not noise
    assert frames[4].float().std() > 10
