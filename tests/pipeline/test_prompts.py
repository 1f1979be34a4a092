import logging

import numpy as np
import pytest
import torch
from PIL import Image

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, resize, save_frames, write_image, write_video
from diagd.families.checkpoints import model_path
from diagd.pipeline import prompts
from diagd.pipeline.prompts import as_frames, is_batch, likeness_notes, seed_of
from tests.worlds import HEIGHT_PX, PROMPT_ACTIONS, WIDTH_PX, smooth_frames, write_world

FRAMES = smooth_frames(3, HEIGHT_PX, WIDTH_PX, seed=4)
ONE = FRAMES[:1]


def pictures(frames):
    return [Image.fromarray(frame.numpy()) for frame in frames]


@pytest.fixture(scope="module")
def generator(world):
    return diagd.VideoGenerator.from_pretrained(world)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (FRAMES, FRAMES),
        (FRAMES.numpy(), FRAMES),
        (FRAMES.flip(0).numpy()[::-1], FRAMES),
        (pictures(FRAMES), FRAMES),
        (list(FRAMES), FRAMES),
        (tuple(FRAMES.numpy()), FRAMES),
        (FRAMES[0], ONE),
        (FRAMES[0].numpy(), ONE),
        (pictures(FRAMES)[0], ONE),
        (pictures(FRAMES)[0].convert("RGBA"), ONE),
    ],
)
def test_frames_are_tensors_arrays_or_pictures(given, expected, generator):
    assert torch.equal(as_frames(given), expected)
    assert not is_batch(given)
    prompt = generator.read_prompt(given)
    assert torch.equal(prompt.frames, expected)
    assert prompt.context_actions == ["none"] * (len(expected) - 1)
    assert prompt.fps == 8.75
    assert len(prompt.notes) == (len(expected) > 1)


@pytest.mark.parametrize(
    "given",
    [[FRAMES], [FRAMES.numpy(), ONE.numpy()], ["a.mp4", "b.mp4"], [pictures(FRAMES)], FRAMES[None]],
)
def test_a_list_of_clips_is_a_batch(given):
    assert is_batch(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FRAMES.movedim(-1, 1), r"uint8 \(3, 3, 24, 40\)"),
        (FRAMES.float(), r"float32 \(3, 24, 40, 3\)"),
        (FRAMES.numpy() / 255, r"float64 \(3, 24, 40, 3\)"),
        (FRAMES[..., 0], r"uint8 \(3, 24, 40\)"),
        (FRAMES[:0], r"uint8 \(0, 24, 40, 3\)"),
        (3, r"int64 \(\)"),
        (None, r"object \(\)"),
    ],
)
def test_what_is_no_frames_is_refused(given, message, generator):
    message = rf"frames must be \(T, H_px, W_px, 3\) uint8 RGB, got {message}$"
    with pytest.raises(ValueError, match=message):
        generator.read_prompt(given)


def test_pictures_of_two_sizes_are_no_clip(generator):
    with pytest.raises(ValueError, match="a clip must be of one size, got 24x40, 24x39"):
        generator.read_prompt([FRAMES[0], FRAMES[0][:, 1:]])


def test_frames_of_another_size_are_fitted_and_it_is_noted(generator):
    large = smooth_frames(2, 50, 70)
    prompt = generator.read_prompt(large.numpy(), ["left"])
    assert torch.equal(prompt.frames, resize(large, HEIGHT_PX, WIDTH_PX))
    note = "prompt is 50x70 pixels: centre-cropped and scaled to 24x40"
    assert (prompt.notes, prompt.context_actions) == ([note], ["left"])


def test_a_path_is_read_with_the_actions_beside_it(generator, world):
    prompt = generator.read_prompt(str(world / "prompt.mp4"))
    assert torch.equal(prompt.frames, read_video(world / "prompt.mp4").frames[-4:])
    assert prompt.context_actions == list(PROMPT_ACTIONS[-3:])
    assert (prompt.fps, prompt.notes) == (8, [])
    assert generator.read_prompt(world / "prompt.mp4", "left").context_actions == ["left"] * 3


def test_without_actions_the_idle_one_stands_between_and_fast_clips_are_slowed(generator, tmp_path):
    frames = smooth_frames(30, HEIGHT_PX, WIDTH_PX)
    write_video(tmp_path / "clip.mp4", frames, fps=26.25)
    prompt = generator.read_prompt(tmp_path / "clip.mp4")
    assert torch.equal(prompt.frames, read_video(tmp_path / "clip.mp4").frames[18::3])
    assert prompt.context_actions == ["none"] * 3
    assert prompt.fps == 8.75
    assert prompt.notes == [
        "prompt has 26.25 frames/s: resampled to the model's 8.75",
        "clip.mp4 has no actions: 'none' inserted between its frames",
    ]
    write_actions(tmp_path / "clip.jsonl", ["left"] * 30)  # a recording: every frame counts
    prompt = generator.read_prompt(tmp_path / "clip.mp4")
    assert torch.equal(prompt.frames, read_video(tmp_path / "clip.mp4").frames[-4:])
    assert (prompt.context_actions, prompt.notes) == (["left"] * 3, [])


@pytest.mark.parametrize("suffix", [".jpg", ".jfif", ".tif", ".avif"])
def test_a_photo_is_one_prompt_by_path_and_as_an_object(suffix, generator, tmp_path):
    path, exif = tmp_path / f"photo{suffix}", Image.Exif()
    exif[0x112] = 5
    photo = Image.fromarray(smooth_frames(1, 70, 50)[0].numpy())
    photo.save(path, {".jfif": "JPEG"}.get(suffix), exif=exif)
    assert torch.equal(
        generator.read_prompt(path).frames, generator.read_prompt(Image.open(path)).frames
    )


def test_of_a_clip_with_actions_only_the_context_is_kept(generator, tmp_path, monkeypatch):
    write_video(tmp_path / "clip.mp4", smooth_frames(30, HEIGHT_PX, WIDTH_PX), fps=8)
    actions = ["left", "right", "none"] * 10
    write_actions(tmp_path / "clip.jsonl", actions)
    kept = []
    monkeypatch.setattr(
        prompts, "read_video", lambda *a, **k: kept.append(read_video(*a, **k)) or kept[0]
    )
    prompt = generator.read_prompt(tmp_path / "clip.mp4")
    assert [len(video.frames) for video in kept] == [4]
    assert torch.equal(prompt.frames, read_video(tmp_path / "clip.mp4").frames[-4:])
    assert prompt.context_actions == actions[-3:]


@pytest.mark.parametrize(
    ("stored", "seen", "note"),
    [
        (17, 17, None),
        (15, 9, "prompt has 15 frames: the model sees the last 9"),
        (9, 9, "prompt has 9 frames: the model sees all of them"),
        (8, 1, "prompt has 8 frames: the model sees the last 1"),
        (1, 1, None),
    ],
)
def test_a_short_clip_of_joined_frames_is_noted_as_it_is_seen(stored, seen, note, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(stored, HEIGHT_PX, WIDTH_PX), fps=8)
    prompt = prompts.read_clip(tmp_path / "clip.mp4", None, 17, 0, 8, frames_per_grid=8)
    assert len(prompt.frames) == seen
    assert prompt.notes == ([] if note is None else [note])


def test_one_frame_takes_no_note(generator, tmp_path):
    write_image(tmp_path / "view.png", FRAMES[0])
    prompt = generator.read_prompt(tmp_path / "view.png")
    assert torch.equal(prompt.frames, ONE)
    assert (prompt.context_actions, prompt.fps, prompt.notes) == ([], 8.75, [])


def test_a_model_without_actions_has_none_between(tmp_path):
    folder = write_world(tmp_path / "still", num_action_tokens=0)
    generator = diagd.VideoGenerator.from_pretrained(folder)
    save_frames(tmp_path / "clip.gif", smooth_frames(4, HEIGHT_PX, WIDTH_PX), 8)
    for given in (FRAMES, tmp_path / "clip.gif"):
        prompt = generator.read_prompt(given)
        assert (prompt.context_actions, prompt.notes) == (None, [])
        with pytest.raises(ValueError, match="this model takes no actions"):
            generator.read_prompt(given, ["left"] * 2)


def test_generate_says_in_a_line_what_it_did(world, caplog):
    generator = diagd.VideoGenerator.from_pretrained(world)
    with caplog.at_level(logging.WARNING, "diagd"):
        video = generator.generate(np.asarray(FRAMES), "left*2")
    note = "the prompt has no actions: 'none' inserted between its frames"
    assert caplog.messages == [note]
    told = generator.generate(FRAMES, ["left"] * 2, context_actions=["none"] * 2)
    assert torch.equal(video.tokens, told.tokens)
    assert len(caplog.messages) == 1


def test_seeds_differ_between_clips_and_follow_the_base_seed():
    assert seed_of("clip_1", 0) == seed_of("clip_1", 0)
    assert seed_of("clip_1", 5) == seed_of("clip_1", 0) + 5
    assert len({seed_of(f"clip_{n}", 0) for n in range(100)}) == 100
    assert all(0 <= seed_of(f"clip_{n}", 2**30) < 2**31 for n in range(100))


def corridor(height, width):
    """Draw walls that meet in the middle, a floor and a sky: (height, width, 3) uint8."""
    rows = torch.linspace(-1, 1, height)[:, None].expand(height, width)
    columns = torch.linspace(-1, 1, width).expand(height, width)
    frame = torch.empty(height, width, 3)
    frame[:] = torch.tensor([120.0, 90.0, 60.0]) * (0.4 + 0.6 * columns.abs()[..., None])
    frame[rows > columns.abs()] = torch.tensor([70.0, 110.0, 70.0])
    frame[rows < -columns.abs()] = torch.tensor([120.0, 170.0, 230.0])
    return frame.byte()


def test_a_picture_unlike_all_that_the_world_learned_is_noted(command, tmp_path):
    world = diagd.VideoGenerator.from_pretrained("doom", dtype="float32")
    folder = model_path("doom")
    scenes = sorted((folder / "scenes").glob("*.mp4"))
    for scene in scenes:
        frame = read_video(scene, last=1).frames[0]
        assert not likeness_notes(world.tokenizer, folder, frame), scene.name
    assert len(scenes) > 3
    height, width = world.frame_size_px
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(0))
    for foreign in (corridor(height, width), noise.byte()):
        (note,) = likeness_notes(world.tokenizer, folder, foreign)
        assert "picture unlike the world's training data" in note
    write_image(tmp_path / "corridor.png", corridor(height, width))
    foreign, walk = corridor(height, width), ["forward"]
    with pytest.warns(UserWarning, match="picture unlike the world's training data") as told:
        world.generate(torch.stack([foreign, foreign])[:, None], [walk, walk], 1)
    assert [(one.filename, len(told)) for one in told] == [(__file__, 1)]  # where it was called
    with pytest.warns(UserWarning, match="picture unlike the world's training data"):
        world.stream(foreign, walk)
    world.generate(scenes[0], walk, 1)  # a warning would be an error
    with pytest.warns(UserWarning, match="picture unlike the world's training data"):
        diagd.GymEnv(world, scenes=tmp_path)
    diagd.GymEnv(world)
    flags = "--prompt", tmp_path / "corridor.png", "--frames", 1, "--raster-frames", 0
    outcome = command("generate", *flags, "--output", tmp_path / "a.mp4", "--json")
    assert outcome.code == 0, outcome.err
    assert "picture unlike the world's" in outcome.err.replace("\n", " ")
