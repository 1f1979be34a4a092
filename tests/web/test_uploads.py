import asyncio
import io
import re
import subprocess
import sys

import av
import numpy as np
import pytest
import torch
from PIL import Image

from diagd.data.video import resize, write_image, write_video
from diagd.metrics.quality import psnr
from diagd.pipeline.prompts import read_clip
from diagd.web import uploads
from diagd.web.upload_decoder import SIGNATURES, container_of, decode
from tests.data.encoding import encode_video
from tests.worlds import smooth_frames

FRAMES = smooth_frames(6, 48, 90)


def upload(data, keep=4):
    return asyncio.run(uploads.decode_upload(data, keep, 24, 40))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_video(path, FRAMES, 8, crf=1)
    return path.read_bytes()


def image(kind, frame=FRAMES[0]):
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, kind)
    return buffer.getvalue()


def test_a_picture_comes_out_as_our_own_resize_would_make_it(tmp_path):
    write_image(tmp_path / "a.png", FRAMES[0])
    frames = upload((tmp_path / "a.png").read_bytes())
    assert torch.equal(frames, resize(FRAMES[:1], 24, 40))


@pytest.mark.parametrize("kind", ["JPEG", "WebP", "BMP", "PNG"])
def test_pictures_of_all_kinds_are_decoded(kind):
    (frame,) = decode(image(kind), 9, 4, 10**6)
    assert psnr(torch.from_numpy(frame)[None], FRAMES[:1])[0] > 30


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.gif", "a.webp", "a.tif", "a.mp4", "a.mkv"])
def test_an_upload_is_what_its_file_is_as_a_prompt(name, tmp_path):
    """Mirrored, transparent, or of more frames a second than the model."""
    path, exif = tmp_path / name, Image.Exif()
    exif[0x112] = 7
    is_still = name in ("a.jpg", "a.tif")
    if name in ("a.mp4", "a.mkv"):
        encode_video(path, FRAMES, 30, "libx264")
    else:
        pictures = [Image.fromarray(frame.numpy()) for frame in FRAMES]
        for picture in () if name == "a.jpg" else pictures:
            picture.putalpha(Image.linear_gradient("L").resize((90, 48)))
        moves = {} if is_still else {"save_all": True, "append_images": pictures[1:]}
        pictures[0].save(path, exif=exif, duration=50, **moves)
    prompt = read_clip(path, None, 2, 0, 10, 1)
    shown = asyncio.run(uploads.decode_upload(path.read_bytes(), 2, 24, 40, fps=10))
    assert torch.equal(shown, resize(prompt.frames, 24, 40))
    assert len(shown) == (1 if is_still else 2)


def test_libraries_are_found_where_the_server_finds_them_but_not_in_the_current_folder(
    clip, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "av.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "there")
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setattr("sys.path", ["", *sys.path])
    decoder = tmp_path / "decoder.py"
    decoder.write_text(f"import only_here\n{uploads.DECODER.read_text()}")
    monkeypatch.setattr(uploads, "DECODER", decoder)
    assert upload(clip).shape == (4, 24, 40, 3)


def test_a_decoder_whose_libraries_are_missing_says_so(clip, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "DECODER", tmp_path / "decoder.py")
    uploads.DECODER.write_text("import no_such_module")
    message = r"this server cannot decode pictures \(ModuleNotFoundError: .*no_such_module"
    with pytest.raises(ValueError, match=message):
        upload(clip)


def test_the_last_frames_of_a_clip_are_kept(clip):
    frames = upload(clip, keep=2)
    assert frames.shape == (2, 24, 40, 3)
    assert psnr(frames, resize(FRAMES[-2:], 24, 40)).min() > 30


def test_a_clip_with_sound_and_another_container_is_decoded_behind_the_lock(tmp_path):
    path = tmp_path / "clip.webm"
    with av.open(str(path), "w") as container:
        picture = container.add_stream("libvpx", rate=8)
        picture.width, picture.height, picture.pix_fmt = 90, 48, "yuv420p"
        sound = container.add_stream("libopus", rate=48000)
        for frame in FRAMES.numpy():
            container.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1920), np.int16), "s16", "stereo")
        silence.sample_rate = 48000
        container.mux([*sound.encode(silence), *sound.encode(None), *picture.encode(None)])
    assert upload(path.read_bytes()).shape == (4, 24, 40, 3)


@pytest.mark.parametrize("kind", ["PNG", "WebP", "GIF"])
def test_an_animation_of_any_length_costs_a_bounded_time(kind, monkeypatch):
    """Many frames in a few kilobytes."""
    monkeypatch.setattr(uploads, "MAX_SECONDS_OF_DECODING", 10)
    frames = [Image.new("RGB", (640, 360), (number, 0, 0)) for number in range(60)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], lossless=True)
    assert len(buffer.getvalue()) < 2**17  # of 40 MB
    assert upload(buffer.getvalue()).shape == (4, 24, 40, 3)


def test_no_more_than_the_first_frames_are_decoded(clip):
    frames = decode(clip, 3, 2, 10**6)
    assert psnr(torch.from_numpy(np.stack(frames)), FRAMES[1:3]).min() > 30


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded():
    with pytest.raises(ValueError, match="must have at most 0 megapixels, is 48x90"):
        decode(image("PNG"), 1, 1, 48 * 90 - 1)
    header = bytearray(image("PNG"))
    header[16:24] = (30000).to_bytes(4) * 2
    with pytest.raises(ValueError, match=r"megapixels, is 30000x30000|damaged"):
        upload(bytes(header))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("kind", ["clip", "PNG"])
def test_what_is_cut_off_is_refused_or_decoded_in_part(kind, share, clip):
    data = clip if kind == "clip" else image(kind)
    cut = data[: int(share * len(data))]
    complaint = ""
    try:
        (frame, *_) = decode(cut, 9, 4, 10**6)
        assert frame.shape == (48, 90, 3)
    except ValueError as error:
        complaint = str(error)
    assert re.search("^$|cannot be decoded|expected a PNG", complaint)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        b"<?xml version='1.0'?><MPD/>",
        b"RIFF\x00\x00\x00\x00AVI LIST",
        b"GIF89a",
        b"%PDF-1.4",
        b"",
    ],
)
def test_containers_that_could_name_other_files_are_not_even_opened(data):
    with pytest.raises(ValueError, match="expected a PNG, JPEG, WebP or BMP image"):
        container_of(data)
    assert not {name for *_, name in SIGNATURES} & {"hls", "concat", "dash", "image2", "svg_pipe"}


def test_behind_the_lock_no_file_can_be_opened_and_no_socket():
    script = (
        f"import sys; sys.path.insert(0, {str(uploads.DECODER.parent)!r})\n"
        "import upload_decoder, socket; upload_decoder.lock_up()\n"
        "for attempt in (lambda: open('/etc/hostname'), socket.socket):\n"
        "    try: attempt()\n"
        "    except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("24\n24\n", "")


def test_an_upload_that_takes_too_long_is_stopped(tmp_path, clip, monkeypatch):
    monkeypatch.setattr(uploads, "DECODER", tmp_path / "slow.py")
    monkeypatch.setattr(uploads, "MAX_SECONDS_OF_DECODING", 0.3)
    uploads.DECODER.write_text("import time; time.sleep(60)")
    with pytest.raises(ValueError, match=r"decoding took longer than 0\.3 seconds"):
        upload(clip)


def test_a_decoder_that_crashes_is_an_error_in_words(tmp_path, clip, monkeypatch):
    monkeypatch.setattr(uploads, "DECODER", tmp_path / "crash.py")
    uploads.DECODER.write_text("import os, sys; sys.stdin.buffer.read(); os.abort()")
    with pytest.raises(ValueError, match="could not be decoded"):
        upload(clip)
