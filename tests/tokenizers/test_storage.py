import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from diagd.tokenizers.vq import read_tensors, read_vq_config, save_files


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_files_are_written_whole_and_read_back(tmp_path):
    weights = {"a.b": torch.arange(6.0).view(2, 3).T}
    save_files(tmp_path / "x", {"kind": "é"}, weights, "w.safetensors", torch.float32)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "config.json",
        "w.safetensors",
    ]
    assert read_vq_config(tmp_path / "x" / "config.json") == {"kind": "é"}
    assert read_tensors(tmp_path / "x" / "w.safetensors")["a.b"].equal(weights["a.b"])


@pytest.mark.parametrize("wrap", [lambda tensors: tensors, lambda tensors: {"state_dict": tensors}])
def test_files_of_torch_are_read_bare_or_wrapped(tmp_path, wrap):
    torch.save(wrap({"a": torch.arange(3)}), tmp_path / "w.ckpt")
    assert read_tensors(tmp_path / "w.ckpt")["a"].tolist() == [0, 1, 2]


def test_a_pickle_that_runs_something_is_refused_and_nothing_runs(tmp_path):
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match=r"w\.ckpt is damaged or holds more than ten") as e:
        read_tensors(tmp_path / "w.ckpt")
    assert "\n" not in str(e.value)
    (tmp_path / "w.ckpt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"w\.ckpt is no file of torch\.save"):
        read_tensors(tmp_path / "w.ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b".", b"R.", b"h\x07.", b"]K\x00K\x00\x86R.", b"cos\nsystem\n."]
)
def test_a_malformed_pickle_is_refused(tmp_path, content):
    torch.save({"a": torch.arange(3)}, tmp_path / "whole.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "whole.ckpt") as whole,
        zipfile.ZipFile(tmp_path / "w.ckpt", "w") as broken,
    ):
        for name in whole.namelist():
            broken.writestr(name, content if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(ValueError, match=r"w\.ckpt is damaged or holds more than tensors: not"):
        read_tensors(tmp_path / "w.ckpt")


@pytest.mark.parametrize("kept", [0, 10, 400, -1])
@pytest.mark.parametrize("name", ["w.ckpt", "w.safetensors"])
def test_truncated_files_are_refused(tmp_path, name, kept):
    save_files(tmp_path, {}, {"a": torch.rand(99)}, "w.safetensors", torch.float32)
    torch.save({"a": torch.rand(99)}, tmp_path / "w.ckpt")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{name} is no .*\(corrupt"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize("content", [[1], {"a": 1}, {"state_dict": {"a": torch.zeros(1), "b": 2}}])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.ckpt")
    message = r"w\.ckpt must hold named tensors, or them under state_dict$"
    with pytest.raises(ValueError, match=message):
        read_tensors(tmp_path / "w.ckpt")


def test_a_config_is_a_json_object(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"^tokenizer file not found: .*config\.json$"):
        read_vq_config(path)
    for content, message in ((b"\xff", "is no JSON: "), (b"{", "is no JSON: "), (b"3", "got int$")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_vq_config(path)
    path.write_text(json.dumps({"a": 1}))
    assert read_vq_config(path) == {"a": 1}
