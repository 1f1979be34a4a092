import pytest
import torch

from diagd.data.actions import write_actions
from diagd.data.video import read_video, save_frames, write_image, write_video
from diagd.families.checkpoints import model_path
from diagd.pipeline.scenes import folder_scenes, model_scenes
from tests.worlds import HEIGHT_PX, NAMES, PROMPT_ACTIONS, WIDTH_PX, smooth_frames


def test_the_prompt_comes_first_and_no_two_scenes_look_alike(world, generator):
    scenes = model_scenes(world, generator, 4)
    assert [scene.name for scene in scenes] == ["opening", *(f"view {n}" for n in (3, 4, 5, 6))]
    assert torch.equal(scenes[0].frames, read_video(world / "prompt.mp4").frames[-4:])
    assert scenes[0].actions == PROMPT_ACTIONS[-3:]
    assert len({scene.frames[-1].numpy().tobytes() for scene in scenes}) == len(scenes)


def test_clips_and_images_of_a_folder_are_scenes_in_order_of_their_names(
    generator, tmp_path, capsys
):
    write_video(tmp_path / "b-clip.mp4", smooth_frames(4, 48, 80), fps=8)
    write_actions(tmp_path / "b-clip.jsonl", NAMES)
    write_image(tmp_path / "a_view.png", smooth_frames(1, 60, 60)[0])
    (tmp_path / "notes.txt").write_text("nothing to see")
    image, clip = folder_scenes(tmp_path, generator, 3)
    assert capsys.readouterr().err.endswith("skipped files of other types: notes.txt\n")
    assert (image.name, clip.name) == ("a view", "b clip")
    assert image.frames.shape == (1, HEIGHT_PX, WIDTH_PX, 3)
    assert clip.frames.shape == (3, HEIGHT_PX, WIDTH_PX, 3)
    assert (clip.actions, clip.fps) == (NAMES[2:], 8)
    assert image.fps == generator.defaults.fps == 8.75  # of the world: a picture has no pace


def test_a_clip_in_any_container_is_a_scene(generator, tmp_path):
    frames = smooth_frames(2, HEIGHT_PX, WIDTH_PX)
    save_frames(tmp_path / "a.gif", frames, 8)
    write_video(tmp_path / "b.m4v", frames, 8)
    for name in ("a", "b"):
        write_actions(tmp_path / f"{name}.jsonl", NAMES[:2])
    scenes = folder_scenes(tmp_path, generator, 2)
    assert [(scene.name, len(scene.frames)) for scene in scenes] == [("a", 2), ("b", 2)]


def test_a_clip_without_its_actions_is_refused(generator, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(4, 48, 80), fps=8)
    with pytest.raises(FileNotFoundError, match=r"action file not found: .*clip\.jsonl"):
        folder_scenes(tmp_path, generator, 3)


def test_a_folder_that_is_not_there_holds_no_scene(generator, tmp_path):
    assert folder_scenes(tmp_path / "none", generator, 4) == []
    assert model_scenes(tmp_path, generator, 4) == []


@pytest.mark.parametrize(("name", "count"), [("doom", 9), ("maze", 5)])
def test_the_bundled_scenes_fit_their_world(name, count):
    from diagd.pipeline.generator import VideoGenerator

    world = VideoGenerator.from_pretrained(name)
    scenes = model_scenes(model_path(name), world, 4)
    assert len(scenes) == 1 + count
    assert all(scene.frames.shape[1:] == (112, 192, 3) for scene in scenes)
    assert all(len(scene.frames) == 4 for scene in scenes)
