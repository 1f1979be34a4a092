"""The reader of pickles says in one line, with the path, that a file is not what it should be."""

import re
import zipfile

import pytest
import torch

from diagd.weight_files import read_torch_file

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
