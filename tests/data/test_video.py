import wave
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from diagd.data.video import (
    contact_sheet,
    read_video,
    resize,
    video_length,
    write_image,
    write_video,
)
from diagd.metrics.quality import psnr
from tests.data.encoding import encode_video
from tests.worlds import smooth_frames


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.mp4"
    write_video(path, smooth_frames(6, 48, 80), fps=8.75)
    return path


def test_a_video_comes_back_as_written(clip):
    video, frames = read_video(clip), smooth_frames(6, 48, 80)
    assert (video.frames.dtype, video.frames.shape) == (torch.uint8, (6, 48, 80, 3))
    assert video.fps == Fraction(35, 4)
    # 4:2:0 chroma at crf 14 costs these pictures little; other colours, order or axes cost far more
    assert psnr(video.frames, frames).min() > 35
    assert psnr(video.frames, frames.roll(1, dims=0)).max() < 20
    assert [path.name for path in clip.parent.iterdir()] == ["clip.mp4"]


def test_the_same_frames_make_the_same_bytes(clip, tmp_path):
    for copy in range(10):
        write_video(tmp_path / f"{copy}.mp4", smooth_frames(6, 48, 80), fps=8.75)
    assert len({path.read_bytes() for path in tmp_path.glob("*.mp4")}) == 1


def test_a_lower_crf_is_closer(tmp_path):
    frames, quality = smooth_frames(3, 48, 80), {}
    for crf in (0, 40):
        write_video(tmp_path / "clip.mp4", frames, crf=crf)
        quality[crf] = psnr(read_video(tmp_path / "clip.mp4").frames, frames).mean()
    assert quality[0] > quality[40] + 5


@pytest.mark.parametrize(("max_frames", "expected"), [(1, 1), (4, 4), (6, 6), (99, 6)])
def test_reading_stops_at_max_frames(max_frames, expected, clip):
    video = read_video(clip, max_frames)
    assert torch.equal(video.frames, read_video(clip).frames[:expected])


@pytest.mark.parametrize("max_frames", [None, 2, 9])
@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize(("fps", "places"), [(None, [0, 1, 2, 3, 4, 5]), (4.375, [0, 2, 4])])
def test_reading_from_a_start_at_another_rate_picks_the_frames(
    fps, places, start, max_frames, clip
):
    video = read_video(clip, max_frames, start=start, fps=fps)
    assert torch.equal(video.frames, read_video(clip).frames[places[start:][:max_frames]])
    assert video.fps == Fraction(fps or 8.75)


def test_frames_fitted_while_reading_are_those_fitted_afterwards(clip):
    fitted = read_video(clip, size_px=(10, 30)).frames
    assert torch.equal(fitted, resize(read_video(clip).frames, 10, 30))


@pytest.mark.parametrize("last", [1, 4, 99])
def test_only_the_last_frames_are_kept(last, clip):
    assert torch.equal(read_video(clip, last=last).frames, read_video(clip).frames[-last:])
    slow = read_video(clip, last=2, fps=4.375)
    assert torch.equal(slow.frames, read_video(clip).frames[[2, 4]])


@pytest.mark.parametrize("name", ["a b.mp4", "Spaß: 1.mp4", "50%d.mp4", "-.mp4", "[1]*.mp4"])
def test_a_file_may_have_any_name(name, clip):
    assert len(read_video(clip.rename(clip.with_name(name))).frames) == 6


def test_a_start_behind_the_end_is_refused(clip):
    with pytest.raises(ValueError, match=r"clip\.mp4: expected more than 6 frames, got"):
        read_video(clip, start=6)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_the_length_of_a_video_is_known_without_decoding(suffix, tmp_path):
    path = tmp_path / f"clip{suffix}"
    encode_video(path, smooth_frames(7, 48, 80), Fraction(30000, 1001))
    assert video_length(path)[0] == len(read_video(path).frames) == 7
    assert float(video_length(path)[1]) == pytest.approx(29.97, abs=0.01)  # mkv keeps milliseconds
    with pytest.raises(FileNotFoundError, match="video not found: "):
        video_length(tmp_path)


def test_the_frame_rate_is_that_of_the_time_stamps_not_of_the_header(tmp_path):
    """A matroska file has its rate written down, but here one frame is missing."""
    encode_video(tmp_path / "whole.mkv", smooth_frames(9, 48, 80), 10, "libvpx")
    with (
        av.open(str(tmp_path / "whole.mkv")) as source,
        av.open(str(tmp_path / "gap.mkv"), "w") as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if number != 1 and packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    assert video_length(tmp_path / "gap.mkv") == (8, Fraction(80, 9))  # 8 in 0.9 seconds


@pytest.mark.parametrize("is_view", [False, True])
def test_a_picture_is_kept_exactly(is_view, tmp_path):
    picture = smooth_frames(1, 19, 34)[0]  # odd sizes, wider than high
    picture = picture.transpose(0, 1).flip(0) if is_view else picture
    write_image(tmp_path / "picture.png", picture)
    video = read_video(tmp_path / "picture.png")
    assert (len(video.frames), video.fps) == (1, 1)
    assert torch.equal(video.frames[0], picture)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_a_missing_video_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"video not found: .*/clip\.mp4"):
        read_video(tmp_path / "clip.mp4")
    with pytest.raises(FileNotFoundError, match="video not found: "):
        read_video(tmp_path)


@pytest.mark.parametrize("damage", [b"\x00", b"\xff", b"diagd"])
def test_a_video_with_damaged_frames_is_refused(damage, clip):
    """Players paint over what they cannot read; as training data or prompt it would be garbage."""
    data = bytearray(clip.read_bytes())
    start, end = data.index(b"mdat") + 4, data.index(b"moov")
    first, last = start + (end - start) // 3, end - (end - start) // 3
    data[first:last] = (damage * len(data))[: last - first]
    clip.write_bytes(data)
    with pytest.raises(ValueError, match=r"clip\.mp4 cannot be decoded \(corrupt or truncated\)"):
        read_video(clip)


@pytest.mark.parametrize("data", [b"", b"no video at all\n" * 40, bytes(4096)])
@pytest.mark.parametrize("name", ["clip.mp4", "clip.png", "clip.jpg"])
def test_what_is_no_video_is_refused(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} .*\(corrupt or truncated\)"):
        read_video(tmp_path / name)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", ["picture.png", "picture.jpg"])
def test_a_truncated_picture_is_refused(name, share, tmp_path):
    path = tmp_path / name
    Image.fromarray(smooth_frames(1, 48, 80)[0].numpy()).save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=rf"{name} .*\(corrupt or truncated\)"):
        read_video(path)


def test_a_file_without_pictures_is_refused(tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1600))
    with pytest.raises(ValueError, match=r"sound\.wav holds no video stream"):
        read_video(tmp_path / "sound.wav")


def test_a_contact_sheet_fills_rows_from_the_left():
    frames = torch.arange(1, 6, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 2, 4, 3)
    sheet = contact_sheet(frames, columns=3, gap_px=1)
    expected = np.array(
        [
            [255] * 16,
            *[[255, 1, 1, 1, 1, 255, 2, 2, 2, 2, 255, 3, 3, 3, 3, 255]] * 2,
            [255] * 16,
            *[[255, 4, 4, 4, 4, 255, 5, 5, 5, 5, 255, 255, 255, 255, 255, 255]] * 2,
            [255] * 16,
        ]
    )
    assert sheet.shape == (7, 16, 3)
    assert all(np.array_equal(sheet[..., channel].numpy(), expected) for channel in range(3))


def test_a_contact_sheet_keeps_pictures_the_right_way_up():
    frames = smooth_frames(2, 6, 10)
    sheet = contact_sheet(frames, columns=2, gap_px=3)
    assert torch.equal(sheet[3:9, 3:13], frames[0])
    assert torch.equal(sheet[3:9, 16:26], frames[1])


@pytest.mark.parametrize(
    ("height_px", "width_px", "rows", "columns"),
    [
        (16, 24, slice(0, 16), slice(8, 32)),
        (10, 40, slice(3, 13), slice(0, 40)),
        (16, 40, slice(0, 16), slice(0, 40)),
    ],
    ids=["too wide", "too high", "as it is"],
)
def test_the_centre_is_cropped_to_the_aspect_ratio(height_px, width_px, rows, columns):
    frames = smooth_frames(2, 16, 40)
    assert torch.equal(resize(frames, height_px, width_px), frames[:, rows, columns])


def test_scaling_keeps_left_and_right_up_and_down():
    frames = torch.zeros(1, 40, 60, 3, dtype=torch.uint8)
    frames[:, :20, :30] = torch.tensor([200, 0, 0], dtype=torch.uint8)  # upper left
    frames[:, 20:, 30:] = torch.tensor([0, 0, 100], dtype=torch.uint8)  # lower right
    small = resize(frames, 8, 12)
    assert small.dtype == torch.uint8
    assert small.is_contiguous()
    assert (small[0, :3, :5] == torch.tensor([200, 0, 0])).all()
    assert (small[0, 5:, 7:] == torch.tensor([0, 0, 100])).all()
    assert (small[0, :3, 7:] == 0).all()


def test_scaling_down_averages_instead_of_picking():
    stripes = torch.zeros(1, 32, 48, 3, dtype=torch.uint8)
    stripes[:, :, ::8] = 200
    inside = resize(stripes, 4, 6)[:, :, 1:-1]
    assert (inside.float() - 200 / 8).abs().max() <= 3


@pytest.mark.parametrize("size", [(40, 1), (1, 40), (1, 1), (3, 200)])
@pytest.mark.parametrize(("height_px", "width_px"), [(16, 40), (40, 16)])
def test_pictures_a_pixel_wide_or_high_can_be_fitted(size, height_px, width_px):
    frames = smooth_frames(1, 40, 200)[:, : size[0], : size[1]]
    fitted = resize(frames, height_px, width_px)
    assert fitted.shape == (1, height_px, width_px, 3)
    assert frames.min() <= fitted.min() <= fitted.max() <= frames.max()
