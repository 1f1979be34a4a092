from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from diagd.data.video import contact_sheet, read_video, save_frames
from diagd.metrics.quality import psnr
from tests.worlds import smooth_frames

FRAMES = smooth_frames(7, 48, 80)


def shown(path):
    """Read what a browser would show: frames, milliseconds each, and how often."""
    with Image.open(path) as picture:
        frames, durations = [], []
        for frame in ImageSequence.Iterator(picture):
            frames.append(torch.from_numpy(np.array(frame.convert("RGB"))))
            durations.append(picture.info["duration"])
        return torch.stack(frames), durations, picture.info["loop"]


@pytest.mark.parametrize(("name", "least"), [("a.gif", 22), ("b.WEBP", 30)])
@pytest.mark.parametrize("fps", [8.75, 24])
def test_an_animation_shows_all_frames_at_their_rate_again_and_again(name, least, fps, tmp_path):
    save_frames(tmp_path / name, FRAMES, fps)
    frames, durations, loop = shown(tmp_path / name)
    assert psnr(frames, FRAMES).min() > least
    assert psnr(frames, FRAMES.roll(1, dims=0)).max() < 20
    assert loop == 0  # for ever
    assert sum(durations[:-1]) == pytest.approx(1000 * 6 / fps, abs=10)  # gif counts in 10 ms
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".mp4"])
def test_one_frame_is_enough(suffix, tmp_path):
    save_frames(tmp_path / f"a{suffix}", FRAMES[:1], 10)
    assert read_video(tmp_path / f"a{suffix}").frames.shape == (1, 48, 80, 3)


@pytest.mark.parametrize(("name", "least"), [("a.gif", 22), ("b.WEBP", 30)])
def test_an_animation_is_read_as_it_was_saved(name, least, tmp_path):
    save_frames(tmp_path / name, FRAMES, 8)
    video = read_video(tmp_path / name)
    assert psnr(video.frames, FRAMES).min() > least
    assert float(video.fps) == pytest.approx(8, rel=0.02)
    halved = read_video(tmp_path / name, fps=4).frames
    assert torch.equal(halved, video.frames[::2])


def test_a_picture_has_the_frames_side_by_side_and_a_video_is_a_video(tmp_path):
    save_frames(tmp_path / "a.png", FRAMES, 10)
    assert torch.equal(read_video(tmp_path / "a.png").frames[0], contact_sheet(FRAMES, columns=5))
    save_frames(tmp_path / "b.png", FRAMES[:1], 10)
    assert torch.equal(read_video(tmp_path / "b.png").frames, FRAMES[:1])
    save_frames(tmp_path / "a.mp4", FRAMES, 8.75)
    video = read_video(tmp_path / "a.mp4")
    assert (len(video.frames), video.fps) == (7, Fraction(35, 4))


@pytest.mark.parametrize("name", ["a.avi", "a"])
def test_another_suffix_is_refused_with_those_possible(name, tmp_path):
    message = rf"output must end in \.mp4, \.gif, \.webp, \.png, got .*{name}$"
    with pytest.raises(ValueError, match=message):
        save_frames(tmp_path / name, FRAMES, 10)
    assert not list(tmp_path.iterdir())
