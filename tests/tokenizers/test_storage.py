import json
from pathlib import Path

import pytest
import torch

from diagd.files import read_json_object
from diagd.weight_files import read_tensors


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrap", [lambda tensors: tensors, lambda tensors: {"state_dict": tensors}])
@pytest.mark.parametrize("is_archive", [True, False])
def test_files_of_torch_are_read_bare_or_wrapped(tmp_path, wrap, is_archive):
    content = wrap({"a": torch.arange(3)})
    torch.save(content, tmp_path / "w.ckpt", _use_new_zipfile_serialization=is_archive)
    assert read_tensors(tmp_path / "w.ckpt")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("is_archive", "message"), [(True, "refused: its pickle loads"), (False, "not a PyTorch check")]
)
def test_a_pickle_that_runs_something_is_refused_and_nothing_runs(tmp_path, is_archive, message):
    content = {"state_dict": Bomb(tmp_path / "ran")}
    torch.save(content, tmp_path / "w.ckpt", _use_new_zipfile_serialization=is_archive)
    with pytest.raises(ValueError, match=rf"w\.ckpt: {message}") as e:
        read_tensors(tmp_path / "w.ckpt")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "ran").exists()


def test_a_config_is_a_json_object(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"^file not found: .*config\.json$"):
        read_json_object(path)
    for content, message in (
        (b"\xff", "expected a text file"),
        (b"{", "not valid JSON: "),
        (b"3", "got int"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_json_object(path)
    path.write_text(json.dumps({"a": 1}))
    assert read_json_object(path) == {"a": 1}
