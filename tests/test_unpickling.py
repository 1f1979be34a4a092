"""The reader of pickles says in one line, with the path, that a file is not what it should be."""

import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch

from diagd.weight_files import read_arrays, read_torch_file

MALFORMED = {
    "foreign persistent id": b"K\x07Q.",
    "persistent id of too few parts": b"U\x07storage\x85Q.",
    "extension code": b"\x82\x07.",
    "nothing": b"",
    "pop of an empty stack": b"R.",
    "memo that is not there": b"h\x07.",
    "call of a tuple": b"]K\x00K\x00\x86R.",
    "name that is no UTF-8": b"c\xff\nfloat\n.",
    "cut in a number": b"J\x00",
    "no number": b"Fone\n.",
}


def refuses(path):
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*$") as caught:
        read_torch_file(path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def whole(tmp_path):
    torch.save({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "whole.pt")
    return tmp_path / "whole.pt"


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_pickle_is_one_line_with_the_path(content, whole, tmp_path):
    path = tmp_path / "hostile.pt"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    refuses(path)


@pytest.mark.parametrize("kept", [0, 2, 10, 400, -1])
def test_a_truncated_file_is_one_line_with_the_path(kept, whole, tmp_path):
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:kept])
    refuses(tmp_path / "cut.pt")


def test_an_archive_in_several_parts_is_one_line_with_the_path(whole, tmp_path):
    content = bytearray(whole.read_bytes())
    content[content.index(b"PK\x06\x07") + 16] = 9  # parts, says the end of the archive
    (tmp_path / "part.pt").write_bytes(content)
    refuses(tmp_path / "part.pt")


@pytest.mark.parametrize("kept", [0, 1, 5, 60, 300, -1])
def test_a_truncated_file_of_the_old_kind_is_one_line_with_the_path(kept, tmp_path):
    """Metrics' weights are often of the time before torch saved zip archives."""
    weights = {"w": torch.arange(6.0).view(2, 3)}
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_torch_file(tmp_path / "old.pth")["w"].equal(weights["w"])
    (tmp_path / "cut.pth").write_bytes((tmp_path / "old.pth").read_bytes()[:kept])
    refuses(tmp_path / "cut.pth")


TREE = {"params": {"Unit": {"kernel": np.arange(6.0, dtype="f4").reshape(2, 3)}}}


@pytest.fixture
def arrays(tmp_path):
    return tmp_path / "arrays.ckpt"


def test_arrays_of_a_pickle_are_read_by_their_keys(arrays):
    odd = {"a": {"rows": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "b": np.ones(2, ">f2")}}
    arrays.write_bytes(pickle.dumps(TREE | odd, protocol=4))
    found = read_arrays(arrays)
    assert found["params/Unit/kernel"].equal(torch.arange(6.0).view(2, 3))
    assert found["a/rows"].equal(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert found["a/b"].equal(torch.ones(2, dtype=torch.float16))


class _Call:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def _endless():
    tree = {}
    tree["again"] = tree
    return tree


def _doubling():
    tree = {"leaf": np.ones(1, "f4")}
    for _ in range(60):
        tree = {"left": tree, "right": tree}
    return tree


HOSTILE = {
    "program": _Call(os.mkdir, ("trapped",)),
    "program of numpy's": {"w": _Call(np.save, ("trapped.npy", 1))},
    "objects": {"w": np.array([{}], dtype=object)},
    "whole numbers": {"w": np.ones(3, "i4")},
    "text": {"w": "weights"},
    "list": [np.ones(3, "f4")],
    "nothing": {"w": None},
    "endless": _endless(),
    "doubling": _doubling(),
    "no elements": {"w": np.ones((0, 3), "f4")},
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_pickle_of_anything_but_arrays_is_one_line_with_the_path(content, arrays, monkeypatch):
    monkeypatch.chdir(arrays.parent)
    arrays.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(arrays))}: .*$") as caught:
        read_arrays(arrays)
    assert "\n" not in str(caught.value)
    assert [path.name for path in arrays.parent.iterdir()] == [arrays.name]


def test_an_array_of_other_size_than_its_bytes_is_refused(arrays):
    content = pickle.dumps(TREE, protocol=4)
    assert content.count(b"K\x02K\x03\x86") == 1
    for shape in (
        b"K\x02K\xff\x86",
        b"J\xff\xff\xff\xffJ\xfa\xff\xff\xff\x86",
        b"K\x02G" + b"\x40" + b"\0" * 7 + b"\x86",
    ):
        arrays.write_bytes(content.replace(b"K\x02K\x03\x86", shape)[11:])  # without the frame
        with pytest.raises(
            ValueError, match=r"expected dicts of NumPy's float arrays, got another"
        ):
            read_arrays(arrays)


@pytest.mark.parametrize("kept", [0, 2, 40, 150, -1])
def test_a_truncated_pickle_of_arrays_is_one_line_with_the_path(kept, arrays):
    arrays.write_bytes(pickle.dumps(TREE, protocol=4)[:kept])
    with pytest.raises(ValueError, match=r"arrays\.ckpt: no pickle of arrays, or a truncated one"):
        read_arrays(arrays)
