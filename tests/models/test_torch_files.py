import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._utils import _rebuild_tensor_v2

from diagd.families.checkpoints import empty_model, find_model
from diagd.weight_files import Record, read_torch_file, read_weights, tensors_of, write_weights

FIXTURES = Path(__file__).parent.parent / "fixtures"


def with_pickle(content: bytes, whole: Path, path: Path) -> Path:
    """Write a copy of a checkpoint that has another pickle in it."""
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return path


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, r"posix\.system|nt\.system"),
        (shutil.rmtree, r"shutil\.rmtree"),
        (eval, r"__builtin__\.eval"),
        (getattr, r"__builtin__\.getattr"),
        (torch.load, r"torch\.serialization\.load"),
    ],
)
def test_a_pickle_that_wants_to_run_something_is_refused_and_nothing_runs(function, name, tmp_path):
    victim = tmp_path / "pwned"
    evil = Calls(function, f"open({str(victim)!r}, 'w')" if function is eval else f"touch {victim}")
    torch.save({"state_dict": {"w": torch.zeros(2)}, "evil": evil}, tmp_path / "model.ckpt")
    message = rf"model\.ckpt: refused: its pickle loads ({name}), .*; no code in it was run"
    with pytest.raises(ValueError, match=message):
        read_torch_file(tmp_path / "model.ckpt")
    assert not victim.exists()


def test_tensors_come_back_as_saved_mapped_from_the_file(tmp_path):
    weights = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.arange(6).view(2, 3)[:, 1:],
        "d": torch.nn.Parameter(torch.randn(2)),
    }
    torch.save(OrderedDict(weights), tmp_path / "model.pt")
    found = tensors_of(read_torch_file(tmp_path / "model.pt"))
    assert list(found) == list(weights)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_the_tensors_may_be_wrapped(key):
    assert list(tensors_of({key: {"w": torch.zeros(1), "step": 3}, "epoch": 2})) == ["w"]


def test_objects_of_foreign_classes_become_inert_records():
    content = read_torch_file(FIXTURES / "wham_tiny" / "model.ckpt")
    predictor = content["hyper_parameters"]["predictor_args"]
    assert isinstance(predictor, Record)
    assert type(predictor).__name__ == "LightningModuleCreationArgs"
    assert predictor.get("pl_kwargs")["model_spec"]["seq_len"] == 4
    assert predictor.get("colour", "none") == "none"


def test_numpy_scalars_beside_the_weights_do_no_harm(tmp_path):
    torch.save({"w": torch.ones(2), "loss": np.float64(3.5)}, tmp_path / "model.pt")
    assert list(tensors_of(read_torch_file(tmp_path / "model.pt"))) == ["w"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^file not found: .*model\.pt$"):
        read_torch_file(tmp_path / "model.pt")


@pytest.mark.parametrize("kept", [0, 2, 10, 400, 0.3, 0.9, 0.999, -1])
def test_a_truncated_file_is_refused_in_one_line(kept, tmp_path):
    content, path = (FIXTURES / "cosmos_tiny_a" / "model.pt").read_bytes(), tmp_path / "model.pt"
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    message = rf"^{re.escape(str(path))}: (not a PyTorch|damaged) checkpoint[,:] .*$"
    with pytest.raises(ValueError, match=message) as caught:
        read_torch_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "not a PyTorch checkpoint"),
        (("version",), "damaged checkpoint: "),
        (("constants.pkl", "data.pkl", "version"), r"expected a checkpoint .*, got a TorchScript"),
    ],
)
def test_files_of_other_kinds_are_refused(parts, message, tmp_path):
    """An old-style pickle, an archive without a pickle, and a program."""
    path = tmp_path / "model.pt"
    if parts is None:
        path.write_bytes(pickle.dumps({"w": 1}, protocol=2))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name in parts:
                archive.writestr(f"archive/{name}", b"3")
    with pytest.raises(ValueError, match=rf"model\.pt: {message}"):
        read_torch_file(path)


def test_a_pickle_of_float8_is_told_where_float8_is_read(tmp_path):
    torch.save({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model.pt")
    message = r"_rebuild_tensor_v3, for float8, which is supported in \.safetensors only; no"
    with pytest.raises(ValueError, match=message):
        read_torch_file(tmp_path / "model.pt")


def test_an_archive_that_was_packed_again_is_refused_as_compressed(tmp_path):
    """Its parts would be taken for weights as they are, without being unpacked."""
    path = tmp_path / "model.pt"
    with (
        zipfile.ZipFile(FIXTURES / "cosmos_tiny_a" / "model.pt") as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(ValueError, match=r"model\.pt: expected an uncompressed archive, got a"):
        read_torch_file(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_program_hidden_from_pythons_zipfile_does_not_run(tmp_path):
    """Python takes the directory just before an archive's end, torch the one that the end names."""
    victim, path = tmp_path / "pwned", tmp_path / "model.pt"
    program = torch.jit.script(torch.nn.Module())
    program.define(f"""
        def __getstate__(self):
            return self.training
        def __setstate__(self, state: bool):
            torch.save(state, {str(victim)!r})
            self.training = state
    """)
    torch.jit.save(program, tmp_path / "program.pt")
    with zipfile.ZipFile(tmp_path / "program.pt") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    content = path.read_bytes()
    end = content.rindex(b"PK\5\6")
    directory = content[int.from_bytes(content[end + 16 : end + 20], "little") : end]
    hiding = directory.replace(b"/constants.pkl", b"/constants_pkl")
    path.write_bytes(content[:end] + hiding + content[end:])
    with pytest.raises(ValueError, match=r"model\.pt: expected a checkpoint .*, got a TorchScript"):
        read_torch_file(path)
    assert not victim.exists()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight[:1, :1].clone().expand(weight.shape),  # of one number
        lambda weight: torch.complex(weight, weight).conj().imag,  # a negated view
    ],
)
def test_weights_that_are_not_in_the_file_as_they_are_are_refused(change, is_old, tmp_path):
    source, path = FIXTURES / "cosmos_tiny_a", tmp_path / "model.pt"
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    weights, name = read_torch_file(source / "model.pt"), "model.tok_embeddings.weight"
    weights[name] = change(weights[name])
    torch.save(weights, path, _use_new_zipfile_serialization=not is_old)
    message = r"1 expanded, negated or sparse tensor: model\.embed_tokens\.weight$"
    with pytest.raises(ValueError, match=message):
        empty_model(find_model(path))


def test_something_else_than_a_dict_is_refused(tmp_path):
    torch.save([torch.zeros(1)], tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt: expected a dict of tensors, got list"):
        read_torch_file(tmp_path / "model.pt")


def test_a_file_leaves_no_attributes_on_the_functions_that_rebuild_tensors(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "whole.pt")
    state = b"N}X\x04\x00\x00\x00markK\x01s\x86b"  # setattr(function, "mark", 1)
    evil = b"\x80\x02}X\x01\x00\x00\x00fctorch._utils\n_rebuild_tensor_v2\n" + state + b"s."
    with_pickle(evil, tmp_path / "whole.pt", tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="damaged checkpoint"):
        read_torch_file(tmp_path / "evil.pt")
    assert not hasattr(_rebuild_tensor_v2, "mark")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_weights_of_a_byte_or_two_are_written_as_they_are(dtype, tmp_path):
    weights = {"w": torch.randn(3, 5).to(dtype)}
    write_weights(tmp_path / "model.safetensors", weights)
    found = read_weights(tmp_path / "model.safetensors")["w"]
    assert (found.dtype, found.shape) == (dtype, (3, 5))
    assert torch.equal(found.float(), weights["w"].float())


def test_weights_of_another_type_are_not_written(tmp_path):
    weights = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"^b cannot be stored in torch\.int64, expected torch\.f"):
        write_weights(tmp_path / "model.safetensors", weights)
    assert not list(tmp_path.iterdir())
