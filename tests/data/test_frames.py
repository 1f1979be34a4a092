"""What files say about showing: each kind is written here, small, and read as it is shown."""

import io
import itertools
import re
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from PIL import Image, ImageOps

from diagd.data.frames import Times
from diagd.data.video import read_video, video_length
from diagd.metrics.quality import psnr
from diagd.pipeline.prompts import as_frames
from tests.data.encoding import encode_video
from tests.worlds import smooth_frames

FRAME = smooth_frames(1, 48, 80)[0]
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def greys(video):
    return video.frames.float().mean((1, 2, 3)).round().int().tolist()


def film(path, stamps, tick=Fraction(1, 10), codec="libx264", size=(48, 80), **options):
    """Write frames of brightness 10, 20 ... at times in ticks."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=30, options={"bf": "0", "crf": "4", **options})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = tick
        for number, stamp in enumerate(stamps, start=1):
            grey = np.full((*size, 3), 10 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = stamp, tick
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_and_mirrored_as_its_tag_says(orientation, kind, tmp_path):
    exif, path = Image.Exif(), tmp_path / f"photo.{kind.lower()}"
    exif[0x112] = orientation
    Image.fromarray(FRAME.numpy()).save(path, exif=exif, quality=95)
    with Image.open(path) as picture:
        shown = torch.from_numpy(np.array(ImageOps.exif_transpose(picture)))
        assert torch.equal(as_frames(picture), read_video(path).frames)
    frame = read_video(path).frames
    assert frame.shape[1:] == shown.shape
    assert psnr(frame, shown[None]).min() > 30


@pytest.mark.parametrize(
    ("mode", "value", "shown"),
    [
        ("RGBA", (*RED, 255), RED),
        ("RGBA", (*RED, 0), WHITE),
        ("RGBA", (*BLUE, 51), (204, 204, 255)),
        ("LA", (90, 0), WHITE),
        ("L", 90, (90, 90, 90)),
        ("1", 1, WHITE),
        ("P", 0, WHITE),  # its colour 0 is transparent
        ("I;16", 90 * 257, (90, 90, 90)),
        ("CMYK", (0, 255, 255, 0), RED),
    ],
)
def test_a_picture_of_any_mode_is_the_same_by_path_and_as_an_object(mode, value, shown, tmp_path):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    picture = Image.new(mode, (80, 48), value)
    if mode == "P":
        picture.putpalette([*BLUE, *RED])
        picture.info["transparency"] = 0
    picture.save(path)
    assert read_video(path).frames[0, 5, 7].tolist() == [*shown]
    assert torch.equal(as_frames(picture), read_video(path).frames)


def test_what_has_no_black_and_white_is_refused(tmp_path):
    Image.new("F", (80, 48), 0.5).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a\.tif cannot be decoded .*: pixels must be integers"):
        read_video(tmp_path / "a.tif")


def test_a_second_picture_that_is_no_second_frame_is_not_shown(tmp_path):
    for name in ("a.mpo", "a.tif"):
        picture, other = Image.fromarray(FRAME.numpy()), Image.new("RGB", (80, 48), RED)
        picture.save(tmp_path / name, save_all=True, append_images=[other])
        video = read_video(tmp_path / name)
        assert (len(video.frames), video.fps, video_length(tmp_path / name)) == (1, 1, (1, 1))
        assert psnr(video.frames, FRAME[None]).min() > 30


def test_a_damaged_tag_turns_nothing(tmp_path):
    exif = b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"
    Image.fromarray(FRAME.numpy()).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(read_video(tmp_path / "a.png").frames[0], FRAME)


def tiles(brand):
    """An AVIF picture of two tiles, 64x64 pixels each: red, then blue."""
    encoded = []
    for colour in (RED, BLUE):
        whole = io.BytesIO()
        Image.new("RGB", (64, 64), colour).save(whole, "AVIF", subsampling="4:4:4", speed=10)
        encoded.append(whole.getvalue())
    payloads = [data[data.index(b"mdat") + 4 :] for data in encoded]
    config = encoded[0][(at := encoded[0].index(b"av1C") - 4) : at + 12]

    def box(kind, *parts, full=None):
        body = (b"" if full is None else full.to_bytes(4)) + b"".join(parts)
        return (8 + len(body)).to_bytes(4) + kind + body

    def item(number, kind):
        return box(b"infe", number.to_bytes(2), bytes(2), kind, b"\0", full=2 << 24)

    def size(width, height):
        return box(b"ispe", width.to_bytes(4), height.to_bytes(4), full=0)

    grid = bytes([0, 0, 0, 1]) + (128).to_bytes(2) + (64).to_bytes(2)

    def meta(place):
        parts, at = [], place
        for number, data in enumerate((grid, *payloads), start=1):
            parts.append(
                number.to_bytes(2) + bytes(2) + b"\0\1" + at.to_bytes(4) + len(data).to_bytes(4)
            )
            at += len(data)
        pixels = box(b"pixi", bytes([3, 8, 8, 8]), full=0)
        return box(
            b"meta",
            box(b"hdlr", bytes(4), b"pict", bytes(13), full=0),
            box(b"pitm", b"\0\1", full=0),
            box(b"iloc", b"\x44\0", b"\0\3", *parts, full=0),
            box(b"iinf", b"\0\3", item(1, b"grid"), item(2, b"av01"), item(3, b"av01"), full=0),
            box(b"iref", box(b"dimg", b"\0\1\0\2\0\2\0\3"), full=0),
            box(
                b"iprp",
                box(b"ipco", size(128, 64), size(64, 64), pixels, config),
                box(
                    b"ipma",
                    (3).to_bytes(4),
                    b"\0\1\2\1\3",
                    b"\0\2\3\2\3\x84",
                    b"\0\3\3\2\3\x84",
                    full=0,
                ),
            ),
            full=0,
        )

    head = box(b"ftyp", brand, bytes(4), brand, b"mif1", b"miaf")
    place = len(head) + len(meta(0)) + 8
    return head + meta(place) + box(b"mdat", grid, *payloads)


def test_tiles_are_joined_or_refused(tmp_path):
    (tmp_path / "a.avif").write_bytes(tiles(b"avif"))
    frame = read_video(tmp_path / "a.avif").frames[0].float()
    assert frame.shape == (64, 128, 3)
    assert (frame[:, :60] - torch.tensor(RED)).abs().max() < 8
    assert (frame[:, 68:] - torch.tensor(BLUE)).abs().max() < 8
    (tmp_path / "a.heic").write_bytes(tiles(b"heic"))  # which Pillow does not read
    with pytest.raises(ValueError, match=r"a\.heic is stored in tiles, .*: save as JPEG"):
        read_video(tmp_path / "a.heic")


ANIMATED = {"a.gif": {}, "a.webp": {"lossless": True}, "a.png": {}, "a.avif": {"quality": 100}}


@pytest.mark.parametrize("name", ANIMATED)
def test_an_animation_keeps_time(name, tmp_path):
    pictures = [Image.new("RGB", (80, 48), (40 * n, 40 * n, 40 * n)) for n in range(5)]
    delays = [100, 300, 100, 500, 200]  # ms
    pictures[0].save(
        tmp_path / name,
        save_all=True,
        append_images=pictures[1:],
        duration=delays,
        **ANIMATED[name],
    )
    video = read_video(tmp_path / name)
    assert greys(video) == pytest.approx([0, 40, 80, 120, 160], abs=2)
    assert (video.fps, video_length(tmp_path / name)) == (Fraction(25, 6), (5, Fraction(25, 6)))
    shown = greys(read_video(tmp_path / name, fps=5))  # every 200 ms
    assert shown == pytest.approx([0, 40, 80, 120, 120, 160], abs=2)


@pytest.mark.parametrize("duration", [{}, {"duration": 0}, {"duration": 10}])
@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_an_animation_without_delays_is_shown_as_browsers_do(name, duration, tmp_path):
    pictures = [Image.new("RGB", (80, 48), (40 * n, 0, 0)) for n in range(5)]
    pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], **duration)
    assert video_length(tmp_path / name) == (5, 10)
    assert len(read_video(tmp_path / name).frames) == 5


def test_parts_of_a_frame_lie_over_the_frames_before(tmp_path):
    frames = [Image.new("RGBA", (80, 48), (*BLUE, 255)), Image.new("RGBA", (80, 48))]
    frames[1].paste((*RED, 255), (8, 8, 24, 24))
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], disposal=1)
    shown = read_video(tmp_path / "a.gif").frames
    assert [shown[1, 10, 10].tolist(), shown[1, 40, 60].tolist()] == [[*RED], [*BLUE]]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "a.ts"])
def test_a_film_of_a_variable_rate_keeps_time(name, tmp_path):
    film(tmp_path / name, [0, 1, 2, 3, 6, 10, 11])  # tenths of a second
    video = read_video(tmp_path / name)
    assert greys(video) == pytest.approx([10, 20, 30, 40, 50, 60, 70], abs=2)
    shown = [10, 20, 30, 40, 40, 40, 50, 50, 50, 50, 60, 70]
    assert greys(read_video(tmp_path / name, fps=10)) == pytest.approx(shown, abs=2)
    assert greys(read_video(tmp_path / name, fps=5, start=2)) == pytest.approx(shown[4::2], abs=2)
    length, rate = video_length(tmp_path / name)
    assert (length, rate) == (7, video.fps)
    assert float(rate) == pytest.approx(7 / 1.2, abs=0.3)  # of the last one nothing is said


def cut(source, target, start, shift):
    """Copy packets from a second on, and shift them, as `ffmpeg -ss -c copy` does."""
    with av.open(str(source)) as file, av.open(str(target), "w") as out:
        stream = out.add_stream_from_template(file.streams.video[0])
        for packet in file.demux(video=0):
            if packet.dts is None or packet.pts is None:
                continue
            if packet.pts * (packet.time_base or 1) >= start:
                packet.pts -= round(shift / packet.time_base)
                packet.dts -= round(shift / packet.time_base)
                packet.stream = stream
                out.mux(packet)


@pytest.mark.parametrize(
    ("start", "shift", "first", "count"), [(0.5, 0.8, 90, 12), (0, -0.6, 10, 20), (0.5, 0, 60, 15)]
)
def test_what_an_edit_leaves_out_is_not_counted(start, shift, first, count, tmp_path):
    film(tmp_path / "whole.mp4", range(20), g="5", sc_threshold="0")
    cut(tmp_path / "whole.mp4", tmp_path / "a.mp4", start, shift)
    video = read_video(tmp_path / "a.mp4")
    assert greys(video) == pytest.approx([first + 10 * n for n in range(count)], abs=2)
    assert video_length(tmp_path / "a.mp4") == (count, video.fps) == (count, 10)
    assert (
        greys(read_video(tmp_path / "a.mp4", last=1, fps=5))
        == greys(read_video(tmp_path / "a.mp4", fps=5))[-1:]
    )


def test_time_stamps_that_begin_late_or_anew_do_not_count(tmp_path):
    for name, first in (("a", 0), ("b", 36_000)):
        film(tmp_path / f"{name}.ts", [first + n for n in range(5)])
    both = (tmp_path / "b.ts").read_bytes() + (tmp_path / "a.ts").read_bytes()
    (tmp_path / "both.ts").write_bytes(both)
    assert video_length(tmp_path / "b.ts") == (5, 10)
    assert greys(read_video(tmp_path / "both.ts", fps=5)) == pytest.approx(
        [10, 30, 50, 20, 40], abs=2
    )
    assert video_length(tmp_path / "both.ts") == (10, 10)


def test_without_time_stamps_the_rate_decides(tmp_path):
    encode_video(tmp_path / "a.h264", smooth_frames(6, 48, 80), 10, "libx264")
    assert video_length(tmp_path / "a.h264") == (6, 10)
    assert len(read_video(tmp_path / "a.h264", fps=5).frames) == 3


MATRICES = {  # of the header of an mp4 track -> what a player does
    (1, 0, 0, 1): lambda frame: frame,
    (0, 1, -1, 0): lambda frame: frame.rot90(-1),  # a phone held upright
    (0, -1, 1, 0): lambda frame: frame.rot90(1),
    (-1, 0, 0, -1): lambda frame: frame.flip(0, 1),
    (-1, 0, 0, 1): lambda frame: frame.flip(1),  # its front camera
    (1, 0, 0, -1): lambda frame: frame.flip(0),
    (0, 1, 1, 0): lambda frame: frame.transpose(0, 1),
    (0, -1, -1, 0): lambda frame: frame.rot90(2).transpose(0, 1),
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_film_is_turned_and_mirrored_as_its_matrix_says(matrix, tmp_path):
    path = tmp_path / "a.mp4"
    encode_video(path, FRAME[None], codec="libx264")
    whole = read_video(path).frames[0]
    data = bytearray(path.read_bytes())
    a, b, c, d = (n.to_bytes(4, signed=True) for n in (m << 16 for m in matrix))
    at = data.index(b"tkhd") + 44  # version 0
    assert data[at : at + 4] == (1 << 16).to_bytes(4)
    data[at : at + 20] = a + b + bytes(4) + c + d
    path.write_bytes(data)
    assert torch.equal(read_video(path).frames[0], MATRICES[matrix](whole))


@pytest.mark.parametrize(
    ("aspect", "size"), [((2, 1), (48, 160)), ((1, 2), (96, 80)), ((16, 15), (48, 85))]
)
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_pixels_have_the_shape_in_which_they_are_shown(name, aspect, size, tmp_path):
    with av.open(str(tmp_path / name), "w") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 80, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(*aspect)
        frame = av.VideoFrame.from_ndarray(FRAME.numpy(), format="rgb24")
        file.mux([*stream.encode(frame), *stream.encode(None)])
    assert read_video(tmp_path / name).frames.shape == (1, *size, 3)


def test_a_film_that_changes_its_size_has_one_size_or_is_refused(tmp_path):
    for name, size, first in (("a", (48, 80), 0), ("b", (96, 160), 3), ("c", (80, 48), 3)):
        film(tmp_path / f"{name}.ts", range(first, first + 3), size=size)
    start = (tmp_path / "a.ts").read_bytes()
    (tmp_path / "larger.ts").write_bytes(start + (tmp_path / "b.ts").read_bytes())
    (tmp_path / "turned.ts").write_bytes(start + (tmp_path / "c.ts").read_bytes())
    assert read_video(tmp_path / "larger.ts").frames.shape == (6, 48, 80, 3)
    message = r"turned\.ts changes its frame size, from 48x80 to 80x48 px"
    with pytest.raises(ValueError, match=message):
        read_video(tmp_path / "turned.ts")


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        *(("a.mkv", "mpeg4", {}), ("a.webm", "libvpx", {}), ("a.avi", "mpeg4", {})),
        *(("a.mov", "mpeg4", {}), ("a.mp4", "libx264", {})),
        # with the index in front a player shows what is left; a training clip would be short
        ("a.mp4", "libx264", {"movflags": "faststart"}),
    ],
)
def test_a_film_whose_end_is_missing_is_refused(name, codec, options, tmp_path):
    path = tmp_path / name
    encode_video(path, smooth_frames(30, 48, 80), codec=codec, **options)
    assert len(read_video(path).frames) == 30
    data = path.read_bytes()
    for share in (0.01, 0.3, 0.5, 0.8, 0.99):
        path.write_bytes(data[: int(share * len(data))])
        for read in (read_video, *([] if options else [video_length])):
            with pytest.raises(ValueError, match=rf"{name} .*truncated") as caught:
                read(path)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_film_whose_tags_are_damaged_is_read(name, tmp_path):
    path = tmp_path / name
    with av.open(str(path), "w") as file:
        file.metadata["title"] = "a quiet afternoon"
        stream = file.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 80, "yuv420p"
        stream.metadata["language"] = "eng"
        frame = av.VideoFrame.from_ndarray(FRAME.numpy(), format="rgb24")
        file.mux([*stream.encode(frame), *stream.encode(None)])
    data = path.read_bytes()
    assert b"quiet" in data
    path.write_bytes(data.replace(b"quiet", b"\xe9\xffie\xe8"))
    assert len(read_video(path).frames) == 1


def test_a_cover_is_not_the_film(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as file:
        cover, film = file.add_stream("png", rate=1), file.add_stream("libx264", rate=10)
        cover.height, cover.width, cover.pix_fmt = 32, 32, "rgb24"
        film.height, film.width, film.pix_fmt = 48, 80, "yuv420p"
        cover.disposition = Disposition.attached_pic.value  # pyright: ignore[reportAttributeAccessIssue]
        for stream, pixels in ((cover, FRAME[:32, :32]), (film, FRAME)):
            frame = av.VideoFrame.from_ndarray(pixels.contiguous().numpy(), format="rgb24")
            file.mux([*stream.encode(frame), *stream.encode(None)])
    with av.open(str(tmp_path / "a.mp4")) as file:
        assert len(file.streams.video) == 2
    assert read_video(tmp_path / "a.mp4").frames.shape[1:3] == (48, 80)


@pytest.mark.parametrize(
    ("rate", "fps", "start", "expected"),
    [
        (Fraction(30), 10, 0, [0, 3, 6, 9, 12]),
        (Fraction(30), 10, 2, [6, 9, 12, 15, 18]),
        (Fraction(30), Fraction(20), 0, [0, 2, 3, 5, 6]),  # 1.5 and 4.5 are rounded up
        (Fraction(30000, 1001), 30, 0, [0, 1, 2, 3, 4]),
        (Fraction(30000, 1001), 30, 900, [900, 901, 902, 903, 904]),  # none twice
        (Fraction(25), 10, 1, [3, 5, 8, 10, 13]),
        (Fraction(10), None, 3, [3, 4, 5, 6, 7]),
    ],
)
def test_a_lower_rate_shows_the_nearest_frames(rate, fps, start, expected):
    numbers = Times.constant(1000, rate).numbers(fps, start)
    assert list(itertools.islice(numbers, 5)) == expected


@pytest.mark.parametrize("fps", [0, -1, 10.2, float("nan"), float("inf")])
def test_a_rate_that_the_video_does_not_have_is_refused(fps):
    with pytest.raises(ValueError, match=r"fps must be above 0 and at most the video's 10, got "):
        Times.constant(9, Fraction(10)).numbers(fps)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "BMP", "AVIF"])
def test_a_damaged_picture_is_read_or_named_in_a_line(kind, tmp_path):
    path, draw, complaints = tmp_path / "a", np.random.default_rng(0), list[str]()
    Image.fromarray(FRAME.numpy()).save(path, kind)
    good = path.read_bytes()
    for _ in range(30):
        data = bytearray(good)
        for place in draw.integers(len(good), size=8):
            data[place] = draw.integers(256)
        path.write_bytes(data)
        try:
            read_video(path)
        except ValueError as error:
            complaints.append(str(error))
    assert [line for line in complaints if not re.match(rf"{path} [^\n]+$", line)] == []
