import io
import zipfile

import numpy as np
import pytest
import torch

from diagd.families.wham.convert import npz_actions, npz_frames, npz_length

T, HEIGHT_PX, WIDTH_PX = 7, 6, 10
IMAGES = np.random.default_rng(0).integers(0, 256, (T, 3, HEIGHT_PX, WIDTH_PX), dtype=np.uint8)
ROWS = np.tile(np.asarray([0] * 12 + [5] * 4, dtype=np.float32), (T, 1))
ROWS[3, 1] = 1


@pytest.fixture(params=[np.savez, np.savez_compressed], ids=["stored", "deflated"])
def clip(request, tmp_path):
    path = tmp_path / "clip.npz"
    request.param(path, actions=ROWS, images=IMAGES, states=np.zeros((T, 56)))
    return path


def test_frames_are_read_as_stored_channels_last(clip):
    assert npz_length(clip) == (T, 10)
    frames = torch.stack(list(npz_frames(clip, range(T))))
    assert frames.dtype == torch.uint8
    assert torch.equal(frames, torch.from_numpy(IMAGES).movedim(1, -1))


@pytest.mark.parametrize("numbers", [[0], [6], [1, 2, 5], []])
def test_only_the_frames_asked_for_are_read(numbers, clip):
    frames = list(npz_frames(clip, numbers))
    assert all(
        torch.equal(frame, torch.from_numpy(IMAGES[number]).movedim(0, -1))
        for frame, number in zip(frames, numbers, strict=True)
    )


def test_the_head_of_a_clip_costs_no_more_than_the_head(tmp_path, monkeypatch):
    np.savez(tmp_path / "clip.npz", images=np.zeros((400, 3, 30, 50), dtype=np.uint8))
    taken = []
    read = zipfile.ZipExtFile.read
    monkeypatch.setattr(
        zipfile.ZipExtFile, "read", lambda self, n=-1: taken.append(n) or read(self, n)
    )
    assert len(list(npz_frames(tmp_path / "clip.npz", range(2)))) == 2
    assert min(taken) >= 0
    assert sum(taken) < 3 * 3 * 30 * 50


def test_actions_are_read_as_words(clip):
    assert npz_actions(clip) == ["none"] * 4 + ["button2"] + ["none"] * 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused(share, clip):
    clip.write_bytes(clip.read_bytes()[: int(clip.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"clip\.npz cannot be read as npz \(corrupt or truncated"):
        npz_length(clip)


def test_damaged_frames_are_refused(tmp_path):
    path = tmp_path / "clip.npz"
    np.savez_compressed(path, images=IMAGES)
    data = bytearray(path.read_bytes())
    data[300:500] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"clip\.npz cannot be read as npz \(corrupt or truncated"):
        list(npz_frames(path, range(T)))


def test_an_archive_whose_names_are_no_text_is_refused(clip):
    clip.write_bytes(clip.read_bytes().replace(b"images", b"imag\x8f\x8f"))
    data = bytearray(clip.read_bytes())
    for start in (place for place in range(len(data)) if data.startswith(b"PK\x01\x02", place)):
        data[start + 9] |= 8  # names are utf-8
    clip.write_bytes(data)
    with pytest.raises(ValueError, match=r"clip\.npz cannot be .*: 'utf-8' codec can't decode"):
        npz_length(clip)


def test_an_archive_that_points_before_its_start_is_refused(clip):
    data = bytearray(clip.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    data[end + 16 : end + 20] = b"\xff\xff\xff\x7f"  # where the directory is said to be
    clip.write_bytes(data)
    with pytest.raises(ValueError, match=r"clip\.npz cannot be read as npz \(corrupt or truncated"):
        npz_length(clip)


def npy(array, claim=None):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    data = buffer.getvalue()
    return data.replace(*claim) if claim else data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", r"clip\.npz: images is no npy array \(corrupt or truncated\)"),
        (b"no array at all", r"clip\.npz: images is no npy array \(corrupt or truncated\)"),
        (npy(np.asarray([{}])), "holds Python objects, which are never unpickled"),
        (npy(np.asfortranarray(IMAGES)), "is stored column by column; save it in C order"),
        (npy(IMAGES, (b"(7, 3,", b"(9, 3,")), "images has not the size that it says"),
        (
            npy(IMAGES[:, :2]),
            r"images must be \(T, 3, H_px, W_px\) uint8, got uint8 \(7, 2, 6, 10\)",
        ),
        (npy(IMAGES[:0]), r"images must be \(T, 3, H_px, W_px\) uint8, got uint8 \(0, 3, 6, 10\)"),
        (npy(IMAGES / 255), r"images must be \(T, 3, H_px, W_px\) uint8, got float64 \(7"),
        (npy(IMAGES[0]), r"images must be \(T, 3, H_px, W_px\) uint8, got uint8 \(3, 6, 10\)"),
    ],
)
def test_images_of_another_kind_are_refused(member, message, tmp_path):
    path = tmp_path / "clip.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", member)
    with pytest.raises(ValueError, match=message) as caught:
        npz_length(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (ROWS + 6, r"clip\.npz: action 0: button1 must be a whole number from 0 to 1, got 6.0"),
        (ROWS[:, :15], r"clip\.npz: actions must be \(T, 16\) numbers, got float32 \(7, 15\)"),
        (ROWS[:0], r"clip\.npz: actions must be \(T, 16\) numbers"),
        (np.float32(3), r"clip\.npz: actions must be \(T, 16\) numbers"),
        (ROWS.astype(object), "actions holds Python objects, which are never unpickled"),
    ],
)
def test_actions_of_another_kind_are_refused(actions, message, tmp_path):
    np.savez(tmp_path / "clip.npz", actions=actions)
    with pytest.raises(ValueError, match=message):
        npz_actions(tmp_path / "clip.npz")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"clip not found: .*clip\.npz"):
        npz_length(tmp_path / "clip.npz")
    np.savez(tmp_path / "clip.npz", frames=IMAGES)
    with pytest.raises(ValueError, match=r"clip\.npz holds no array 'images', found: 'frames'"):
        npz_length(tmp_path / "clip.npz")


def test_an_encrypted_archive_is_refused(tmp_path):
    np.savez(tmp_path / "clip.npz", images=IMAGES)
    data = bytearray((tmp_path / "clip.npz").read_bytes())
    data[6] |= 1  # the flags of the member, and those of the directory
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "clip.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"clip\.npz cannot be read as npz: .*encrypted"):
        npz_length(tmp_path / "clip.npz")


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("images", "(1, 3, 9000, 9000)", r"images has rows, or a number of them, beyond reason"),
        ("actions", "(1, 99000000)", r"actions has rows, or a number of them, beyond reason"),
        ("actions", "(9000000, 16)", r"actions has rows, or a number of them, beyond reason"),
    ],
)
def test_arrays_that_inflate_without_end_are_refused(name, header, message, tmp_path):
    count = np.prod([int(size) for size in header.strip("()").split(",")])
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {header}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(count)
    with zipfile.ZipFile(tmp_path / "clip.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", content)
    read = npz_length if name == "images" else npz_actions
    with pytest.raises(ValueError, match=rf"clip\.npz: {message}"):
        read(tmp_path / "clip.npz")
