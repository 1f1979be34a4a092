import pytest
import torch

from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.video import read_video, resize
from diagd.evaluation.evaluate import choose_clips
from diagd.families.clip_files import find_clips
from tests.evaluation.lines import write_clips
from tests.worlds import HEIGHT_PX, NAMES, WIDTH_PX

CODEC = ActionVocabulary(NAMES)
SIZE = HEIGHT_PX, WIDTH_PX


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips") / "clips", count=6)


def test_a_larger_choice_of_one_seed_contains_the_smaller(folder):
    choices = [choose_clips(folder, count, seed=3) for count in (2, 4, 6)]
    assert set(choices[0]) < set(choices[1]) < set(choices[2])
    assert choices[2] == [f"clip_{n}" for n in range(6)]
    assert len({tuple(choose_clips(folder, 2, seed)) for seed in range(9)}) > 2


def test_without_a_number_all_clips_are_chosen_up_to_a_limit(folder):
    assert len(choose_clips(folder, None, 0)) == len(choose_clips(folder, None, 0, limit=100)) == 6
    assert len(choose_clips(folder, None, 0, limit=4)) == 4


def test_a_clip_is_frames_and_the_actions_that_led_to_them(folder):
    clip = find_clips(folder, CODEC)["clip_1"].read(3, 2, None, SIZE)
    assert torch.equal(clip.frames, read_video(folder / "clip_1.mp4").frames[2:5])
    assert clip.actions == read_actions(folder / "clip_1.jsonl", CODEC)[2:5]
    assert (clip.name, clip.fps) == ("clip_1", 8)


def test_frames_are_fitted_to_the_model_and_actions_left_where_it_takes_none(folder):
    clip = find_clips(folder, None)["clip_1"].read(2, 0, 8.0, (16, 16))
    assert torch.equal(clip.frames, resize(read_video(folder / "clip_1.mp4", 2).frames, 16, 16))
    assert clip.actions is None


def test_clips_that_cannot_be_used_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"clip_1\.mp4: expected at least 5 frames from frame 2"):
        find_clips(folder, CODEC)["clip_1"].read(5, 2, None, SIZE)
    with pytest.raises(ValueError, match=r"clip_1\.mp4.* 8.*10"):
        find_clips(folder, CODEC)["clip_1"].read(5, 0, 10, SIZE)
    with pytest.raises(ValueError, match="expected a number of clips from 1 to 6, got 7"):
        choose_clips(folder, 7, 0)
    with pytest.raises(FileNotFoundError, match="folder of clips, or file of prompts, not found"):
        choose_clips(tmp_path / "absent", 1, 0)
