import io
from pathlib import Path

import av
import pytest
import torch

from diagd.data.video import read_video
from diagd.web.study.pairs import find_pairs, playable
from tests.web.study.cases import ACTIONS, COLOURS, write_clip, write_pairs


def test_two_systems_need_no_word_and_the_diagonal_stands_first(tmp_path):
    pairs = find_pairs(write_pairs(tmp_path, 2))
    assert pairs.comparisons == (("k=1", "raster"),)
    assert pairs.clips == {"dream_0": ACTIONS, "dream_1": ACTIONS}
    assert pairs.questions == ("quality", "consistency", "controllability")


def test_systems_that_are_not_compared_are_not_read(tmp_path):
    write_pairs(tmp_path, 1)
    write_clip(tmp_path / "k=2" / "other.mp4", COLOURS["k=2"])
    assert find_pairs(tmp_path, ("raster:k=1",)).comparisons == (("raster", "k=1"),)


def test_without_actions_nobody_is_asked_about_them(tmp_path):
    for path in write_pairs(tmp_path, 1).rglob("*.jsonl"):
        path.unlink()
    assert find_pairs(tmp_path).questions == ("quality", "consistency")
    with pytest.raises(ValueError, match=r"controllability needs the actions of every clip: no d"):
        find_pairs(tmp_path, questions=("controllability",))


def test_the_digest_is_of_what_raters_see(tmp_path):
    before = find_pairs(write_pairs(tmp_path, 1)).digest
    assert find_pairs(tmp_path).digest == before
    write_clip(tmp_path / "k=1" / "dream_0.mp4", (90, 90, 90))
    assert find_pairs(tmp_path).digest != before


def test_a_clip_is_shown_without_what_the_file_says_about_itself(tmp_path):
    source, titled = tmp_path / "a.mp4", tmp_path / "b.mp4"
    write_clip(source, COLOURS["raster"])
    with av.open(str(source)) as plain, av.open(str(titled), "w") as target:
        target.metadata["title"] = "made by raster"
        stream = target.add_stream_from_template(plain.streams.video[0])
        for packet in plain.demux(plain.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    assert b"made by raster" in titled.read_bytes()
    shown = playable(titled)
    assert b"raster" not in shown
    with av.open(io.BytesIO(shown), "r") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    kept = read_video(titled).frames
    assert torch.equal(torch.stack([torch.from_numpy(frame) for frame in frames]), kept)


def test_a_folder_with_a_colon_in_its_name_is_no_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_pairs(Path("pairs-12:30"), 1)
    assert list(find_pairs(folder).clips) == ["dream_0"]
    assert playable(folder / "k=1" / "dream_0.mp4")


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ((), r"choose with --compare A:B among k=1, k=2, raster"),
        (("k=1",), r"compare must look like A:B, two different ones of .*, got 'k=1'"),
        (("k=1:k=1",), r"compare must look like A:B, two different"),
        (("k=1:k=4",), r"compare must look like A:B, two different ones of k=1, k=2, raster, got"),
        (("k=1:raster", "raster:k=1"), r"raster and k=1 are compared twice"),
    ],
)
def test_a_comparison_names_two_systems(compare, message, tmp_path):
    write_pairs(tmp_path, 1, ("raster", "k=1", "k=2"))
    with pytest.raises(ValueError, match=message):
        find_pairs(tmp_path, compare)


def spoil_folder(folder):
    for path in (folder / "k=1").iterdir():
        path.unlink()


def spoil_names(folder):
    (folder / "k=1" / "dream_1.mp4").rename(folder / "k=1" / "other.mp4")


def spoil_video(folder):
    path = folder / "k=1" / "dream_1.mp4"
    path.write_bytes(path.read_bytes()[:700])


def spoil_length(folder):
    write_clip(folder / "k=1" / "dream_1.mp4", COLOURS["k=1"], 5)
    (folder / "k=1" / "dream_1.jsonl").unlink()


def spoil_actions(folder):
    path = folder / "k=1" / "dream_1.jsonl"
    path.write_text(path.read_text().replace("left", "right"))


def spoil_action_file(folder):
    (folder / "k=1" / "dream_1.jsonl").write_text('{"action": "left"}\n')


def spoil_codec(folder):
    with av.open(str(folder / "k=1" / "dream_0.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 80, 48, "yuv420p"
        frame = av.VideoFrame(80, 48, "yuv420p")
        container.mux([*stream.encode(frame), *stream.encode(None)])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_folder, r"must hold two or more folders of mp4 clips, .*, got raster"),
        (spoil_names, r"need the same names: raster has dream_1\.mp4, k=1 has not"),
        (spoil_video, r"dream_1\.mp4 cannot be decoded \(corrupt or truncated\)"),
        (
            spoil_length,
            r"dream_1\.mp4 must be alike .*: k=1 has 5 frames of 48x80 at 12 a .*no actions, r",
        ),
        (spoil_actions, r"dream_1\.mp4 must be alike in frames, size, rate and actions"),
        (spoil_action_file, r'dream_1\.jsonl: expected 6 lines \{"action": NAME\}, one a frame'),
        (spoil_codec, r"cannot be shown in browsers: expected h264, vp9, av1, got mpeg4"),
    ],
)
def test_what_cannot_be_shown_fairly_is_refused(spoil, message, tmp_path):
    spoil(write_pairs(tmp_path, 2))
    with pytest.raises(ValueError, match=message):
        find_pairs(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder of pairs not found: .*nowhere"):
        find_pairs(tmp_path / "nowhere")
