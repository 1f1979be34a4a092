import json
import pickle
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from diagd.data.actions import ActionVocabulary, write_actions
from diagd.data.video import read_video, resize, write_video
from diagd.families.clip_files import find_clips
from diagd.families.mineworld import MinecraftActions
from diagd.families.wham.actions import WHAMActions
from tests.data.encoding import encode_video
from tests.worlds import smooth_frames

T, HEIGHT_PX, WIDTH_PX = 12, 32, 48
WALK = ActionVocabulary(("none", "forward", "left"))
NAMES = ["none", *["forward", "left", "left"] * 4][:T]


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two clips of 30 frames a second with actions, one of them in a folder of its own."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "later").mkdir()
    for path in (folder / "a.mp4", folder / "later" / "b.mp4"):
        write_video(path, smooth_frames(T, HEIGHT_PX, WIDTH_PX), fps=30)
        write_actions(path.with_suffix(".jsonl"), NAMES)
    (folder / "README.md").write_text("no clip")
    (folder / ".a.mp4").write_text("hidden")
    return folder


@pytest.fixture
def npz(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (T, 3, HEIGHT_PX, WIDTH_PX), dtype=np.uint8)
    actions = np.zeros((T, 16), dtype=np.float32)
    actions[:, 12:] = 5
    actions[:, 12] = np.arange(T) % 11
    np.savez_compressed(tmp_path / "FB_1_data.npz", images=images, actions=actions)
    (tmp_path / "FB_1.mp4").write_text("WHAM's samples have a video beside the data")
    return tmp_path


def test_a_folder_of_videos_is_listed_by_name(videos):
    clips = find_clips(videos)
    assert list(clips) == ["a", "later/b"]
    assert clips["later/b"].path == videos / "later" / "b.mp4"
    assert clips["a"].read().actions is None
    assert torch.equal(clips["a"].read().frames, read_video(videos / "a.mp4").frames)


@pytest.mark.parametrize("suffix", [".mkv", ".avi", ".MOV", ".webm", ".gif"])
def test_any_container_will_do(suffix, tmp_path):
    path = tmp_path / f"clip{suffix}"
    codec, pixels = {".webm": ("libvpx-vp9", "yuv420p"), ".gif": ("gif", "rgb8")}.get(
        suffix, ("mpeg4", "yuv420p")
    )
    encode_video(path, smooth_frames(T, HEIGHT_PX, WIDTH_PX), 10, codec, pixels)
    (clip,) = find_clips(tmp_path).values()
    read = clip.read(num_frames=3, start=2, size_px=(16, 24))
    assert read.frames.shape == (3, 16, 24, 3)
    assert (clip.length()[0], read.fps) == (T, 10)


@pytest.mark.parametrize(("num_frames", "start"), [(None, 0), (5, 0), (5, 3), (None, 4), (T, 0)])
def test_actions_go_with_their_frames(num_frames, start, videos):
    clip = find_clips(videos, codec=WALK)["a"].read(num_frames, start)
    chosen = slice(start, None if num_frames is None else start + num_frames)
    assert clip.actions == NAMES[chosen]
    assert torch.equal(clip.frames, read_video(videos / "a.mp4").frames[chosen])
    assert (clip.name, clip.fps) == ("a", 30)


def test_vpt_recordings_are_read_through_the_codec(tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(3, HEIGHT_PX, WIDTH_PX), fps=20)
    lines = [
        {"keyboard": {"keys": keys}, "mouse": {"dx": 70, "dy": 0.0, "buttons": [0]}}
        for keys in ([], ["key.keyboard.w"], ["key.keyboard.tab"])
    ]
    (tmp_path / "clip.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (clip,) = find_clips(tmp_path, codec=MinecraftActions()).values()
    turn = "attack+camera(0,10)"
    assert clip.read().actions == [turn, "forward+" + turn, turn]


def test_npz_clips_have_frames_and_the_actions_before_them(npz):
    (reference,) = find_clips(npz, codec=WHAMActions()).values()
    assert (reference.name, reference.length()) == ("FB_1_data", (T, 10))
    with np.load(npz / "FB_1_data.npz") as stored:
        frames = torch.from_numpy(stored["images"]).movedim(1, -1)
    clip = reference.read()
    assert torch.equal(clip.frames, frames)
    assert clip.actions is not None
    assert clip.actions[:4] == ["none", "stick1=0", "stick1=1", "stick1=2"]
    part = reference.read(4, start=3, size_px=(16, 24))
    assert torch.equal(part.frames, resize(frames[3:7], 16, 24))
    assert part.actions == clip.actions[3:7]
    assert find_clips(npz)["FB_1_data"].read(2).actions is None
    halved = find_clips(npz)["FB_1_data"].read(start=1, fps=5)
    assert (halved.fps, torch.equal(halved.frames, frames[2::2])) == (5, True)


def test_videos_that_recordings_displace_are_named_but_those_of_the_same_name(npz, capsys):
    (npz / "FB_1_data.mp4").touch()
    assert list(find_clips(npz)) == ["FB_1_data"]
    assert capsys.readouterr().err.endswith("skipped files of other types: FB_1.mp4\n")


def test_a_video_can_be_read_at_a_lower_rate(videos):
    clip = find_clips(videos)["a"].read(fps=10)
    assert torch.equal(clip.frames, read_video(videos / "a.mp4").frames[::3])
    assert clip.fps == 10
    assert len(find_clips(videos)["a"].read(2, start=2, fps=10).frames) == 2


@pytest.mark.parametrize("fps", [None, 5, 10])
def test_a_clip_of_a_variable_rate_has_the_frames_that_were_promised(fps, tmp_path):
    """Every other frame of the last seconds was dropped."""
    path, tick = tmp_path / "a.mkv", Fraction(1, 10)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = HEIGHT_PX, WIDTH_PX, "yuv420p"
        pictures = smooth_frames(T, HEIGHT_PX, WIDTH_PX).numpy()
        for time, picture in zip([*range(6), *range(6, 18, 2)], pictures, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, tick
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    clip = find_clips(tmp_path)["a"]
    count = {None: 12, 5: 9, 10: 17}[fps]
    assert (clip.check(fps=fps), len(clip.read(fps=fps).frames)) == (count, count)
    assert torch.equal(clip.read(fps=fps).frames, read_video(path, fps=fps).frames)
    assert torch.equal(clip.read(3, 6, fps).frames, read_video(path, 3, start=6, fps=fps).frames)


def test_actions_cannot_be_read_at_another_rate(videos):
    clip = find_clips(videos, codec=WALK)["a"]
    with pytest.raises(ValueError, match=r"a\.mp4: actions are given at 30 fps and .* at 10"):
        clip.read(fps=10)
    same = clip.read(fps=29.97)
    assert (same.actions, same.fps) == (NAMES, 30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_frames": 13},
            r"expected at least 13 frames from frame 0 on, got 12 \(the clip has 12",
        ),
        ({"num_frames": 9, "start": 4}, r"expected at least 9 frames from frame 4 on, got 8 \("),
        ({"start": 12}, "expected at least 1 frames from frame 12 on, got 0"),
        (
            {"num_frames": 5, "fps": 10},
            "expected at least 5 frames from frame 0 on at 10 fps, got 4",
        ),
        ({"fps": 60}, "fps must be above 0 and at most the video's 30, got 60"),
    ],
)
def test_a_clip_that_is_too_short_is_named_before_it_is_decoded(arguments, message, videos):
    clip = find_clips(videos)["later/b"]
    for act in (clip.check, clip.read):
        with pytest.raises(ValueError, match=rf"later/b\.mp4: {message}"):
            act(**arguments)


def test_a_check_says_how_many_frames_there_are(videos):
    clip = find_clips(videos, codec=WALK)["a"]
    assert [clip.check(), clip.check(5, start=3)] == [12, 9]
    assert find_clips(videos)["a"].check(fps=10) == 4


def test_a_reference_is_small_and_can_be_sent(videos):
    clip = find_clips(videos, codec=WALK)["a"]
    assert pickle.loads(pickle.dumps(clip)) == clip
    assert len(pickle.dumps(clip)) < 1000


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder of clips not found: .*/nowhere"):
        find_clips(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no clips \(\.mp4, \.mkv, .*\.npz\) in /"):
        find_clips(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")
    (tmp_path / "clip.avi").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"names of clips must differ, got .*clip\.avi and .*clip\.mp4"
    ):
        find_clips(tmp_path)


def test_a_corrupt_video_is_named(tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"clip\.mp4 cannot be decoded \(corrupt or truncated\)"):
        find_clips(tmp_path)["clip"].read()


@pytest.mark.parametrize("num_frames", [None, 9])
def test_a_video_that_lost_its_first_key_frame_is_refused(num_frames, tmp_path):
    """Its packets can be counted, but those before the next key frame show nothing."""
    with av.open(str(tmp_path / "clip.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"x264-params": "keyint=6"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT_PX, WIDTH_PX, "yuv420p"
        frames = smooth_frames(T, HEIGHT_PX, WIDTH_PX).numpy()
        pictures = [av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in frames]
        packets = [packet for picture in [*pictures, None] for packet in stream.encode(picture)]
        assert [packet.is_keyframe for packet in packets].count(True) > 1
        container.mux(packets[1:])
    (clip,) = find_clips(tmp_path).values()
    assert clip.length() == (T - 1, 10)
    with pytest.raises(
        ValueError, match=r"clip\.mkv is truncated: expected .* frames, decoded \d$"
    ):
        clip.read(num_frames)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (NAMES[:-1], r"clip\.jsonl: expected 12 actions, got 11"),
        ([*NAMES, "none"], r"clip\.jsonl: expected 12 actions, got 13"),
        (["none", "jump"], r"clip\.jsonl:2: unknown action 'jump'"),
    ],
)
def test_wrong_actions_are_named(lines, message, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(T, HEIGHT_PX, WIDTH_PX))
    write_actions(tmp_path / "clip.jsonl", lines)
    with pytest.raises(ValueError, match=message):
        find_clips(tmp_path, codec=WALK)["clip"].read(num_frames=2)


def test_a_missing_action_file_is_named(tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(T, HEIGHT_PX, WIDTH_PX))
    with pytest.raises(FileNotFoundError, match=r"action file not found: .*/clip\.jsonl$"):
        find_clips(tmp_path, codec=WALK)["clip"].read()


def test_npz_clips_with_wrong_actions_are_named(npz):
    with pytest.raises(
        ValueError, match=r"FB_1_data\.npz: unknown action 'stick1=0', expected one"
    ):
        find_clips(npz, codec=WALK)["FB_1_data"].read()
    images = np.zeros((3, 3, HEIGHT_PX, WIDTH_PX), dtype=np.uint8)
    np.savez(npz / "FB_1_data.npz", images=images, actions=np.zeros((2, 16)))
    with pytest.raises(ValueError, match=r"FB_1_data\.npz: expected 3 actions .*, got 2"):
        find_clips(npz, codec=WHAMActions())["FB_1_data"].read()


def test_portrait_and_odd_sizes_fit_a_model(tmp_path):
    path = tmp_path / "clip.mp4"
    rate = Fraction(30000, 1001)
    encode_video(path, smooth_frames(9, 61, 35), rate, "libx264", "yuv444p")
    clip = find_clips(tmp_path)["clip"].read(num_frames=3, fps=10, size_px=(16, 40))
    assert clip.frames.shape == (3, 16, 40, 3)
    assert torch.equal(clip.frames, resize(read_video(path).frames[[0, 3, 6]], 16, 40))
