"""The reader of pickles says in one line, with the path, that a file is not what it should be."""

import os
import pickle
import re
import struct

import numpy as np
import pytest
import torch

from diagd.weight_files import read_arrays, read_torch_file, tensors_of
from tests.models.test_torch_files import with_pickle

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
    refuses(with_pickle(content, whole, tmp_path / "hostile.pt"))


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


CLAIMS = {
    "a million tuples in one another, a key": b"\x80\x02})" + b"\x85" * 10**6 + b"K\x00s.",
    "tuples in one another, by way of the memo": b"\x80\x02})"
    + b"".join(b"r%sj%s\x85" % ((struct.pack("<I", i),) * 2) for i in range(200))
    + b"K\x00s.",
    "place 134 million of the memo": b"\x80\x02}r" + struct.pack("<I", 2**27) + b".",
    "a text of 2 GB": b"\x80\x02}X\xff\xff\xff\x7fa.",
    "two million lists": b"\x80\x02(" + b"]" * 2**21 + b"1}.",
    "a hundred thousand classes": b"\x80\x02(" + b"cnumpy\na\n" * 10**5 + b"1}.",
}
LARGE_ARRAY = b"\x80\x02}cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85RK\x00s."  # 2**30 bytes


@pytest.mark.parametrize("content", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("is_old", [False, True])
def test_what_a_pickle_only_claims_is_refused_before_it_runs(content, is_old, whole, tmp_path):
    path = tmp_path / "claims.pt"
    if is_old:
        path.write_bytes(old_file(content))
    else:
        with_pickle(content, whole, path)
    refuses(path)


def test_an_old_file_makes_no_arrays_of_the_size_it_names(tmp_path):
    """Which torch allows."""
    (tmp_path / "array.pth").write_bytes(old_file(LARGE_ARRAY))
    refuses(tmp_path / "array.pth")


def test_functions_cannot_be_put_into_one_another(whole, tmp_path):
    """Millions of them would be freed by recursion."""
    state = b"(ctorch\nSize\n)}Nt"  # function, arguments, keywords, attributes
    content = b"\x80\x02}ctorch._utils\n_rebuild_tensor_v2\n" + state + b"bK\x00s."
    path = with_pickle(content, whole, tmp_path / "f.pt")
    with pytest.raises(
        ValueError, match=r"f\.pt: damaged checkpoint: the pickle changes a function of torch"
    ):
        read_torch_file(path)


def old_file(content):
    """Build a file as torch wrote them before version 1.6: five pickles, no storages."""
    sizes = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    first = [pickle.dumps(one, 2) for one in (torch.serialization.MAGIC_NUMBER, 1001, sizes)]
    return b"".join([*first, content, pickle.dumps([], 2)])


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight[:1, :1].clone().expand(2**20, 64),
        lambda weight: torch.empty(2**25, 0),
        lambda weight: weight[:1].clone().as_strided((2**20, 1), (0, 0)),
    ],
    ids=["expanded", "without width", "strided"],
)
def test_tensors_of_more_numbers_than_a_file_holds_are_refused(change, is_old, tmp_path):
    weights, path = {"w": change(torch.ones(2, 3))}, tmp_path / "w.pt"
    torch.save(weights, path, _use_new_zipfile_serialization=not is_old)
    with pytest.raises(
        ValueError, match=r"w\.pt: its tensors need \d+ bytes, the file has \d+: exp"
    ):
        read_torch_file(path)


def test_a_tensor_under_a_thousand_names_is_refused_and_tied_weights_are_not(tmp_path):
    weight = torch.ones(300, 10)
    torch.save({f"layers.{i}": weight for i in range(1000)}, tmp_path / "shared.pt")
    with pytest.raises(ValueError, match=r"shared\.pt: its tensors need 12000000 bytes"):
        read_torch_file(tmp_path / "shared.pt")
    torch.save({"embedding": weight, "head": weight}, tmp_path / "tied.pt")
    assert list(read_torch_file(tmp_path / "tied.pt")) == ["embedding", "head"]


def test_names_that_are_no_texts_name_no_tensors(tmp_path):
    torch.save({"w": torch.ones(2), 3: torch.ones(2)}, tmp_path / "numbers.pt")
    assert list(tensors_of(read_torch_file(tmp_path / "numbers.pt"))) == ["w"]


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
        with pytest.raises(ValueError, match=r"expected dicts of NumPy's float arrays, got others"):
            read_arrays(arrays)


@pytest.mark.parametrize("kept", [0, 2, 40, 150, -1])
def test_a_truncated_pickle_of_arrays_is_one_line_with_the_path(kept, arrays):
    arrays.write_bytes(pickle.dumps(TREE, protocol=4)[:kept])
    with pytest.raises(ValueError, match=r"arrays\.ckpt: not a pickle of arrays, or truncated"):
        read_arrays(arrays)
