"""The files of a tokenizer: a config.json, and tensors that are checked against what it says.

Nothing is unpickled but tensors, and every way a file can be wrong is one line that names it.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from diagd.files import write_bytes, write_json
from diagd.finite import as_finite
from diagd.unpickling import UNPICKLING_ERRORS

CONFIG_NAME = "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, or no object.
    """
    require_file(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also: too long a number, nested too deeply
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors from a .safetensors file, or else from one that `torch.save` wrote.

    The latter is read by torch's loader for tensors only; a dict `state_dict` inside it, with which
    checkpoints of trainers begin, is unwrapped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged, or anything but tensors under names.
    """
    require_file(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file (corrupt?): {error}") from None
    try:
        is_zip = zipfile.is_zipfile(path)  # mapping into memory needs one, too
    except UNPICKLING_ERRORS:
        is_zip = False
    if not is_zip:
        raise ValueError(f"{path} is no file of torch.save (corrupt or truncated?)")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNPICKLING_ERRORS:  # whose texts advise to execute the file
        raise ValueError(f"{path} is damaged or holds more than tensors: not loaded") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} must hold named tensors, or them under state_dict")
    return content


def check_weights(
    where: str | Path,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    described_by: str = CONFIG_NAME,
) -> None:
    """Raise ValueError unless names and shapes agree, and all numbers are finite.

    Args:
        where: what holds the weights, for the message.
        described_by: what the expected shapes follow from, for the message.
    """
    for problem, names in (
        ("misses weights", sorted(expected.keys() - found.keys())),
        ("holds unknown weights", sorted(found.keys() - expected.keys())),
    ):
        if names:
            raise ValueError(f"{where} {problem} (does it fit {described_by}?): {_listed(names)}")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: {name} must be {tuple(tensor.shape)} as {described_by} says, "
                f"got {tuple(found[name].shape)}"
            )
        as_finite(found[name], where, name)


def save_files(
    folder: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    weights_name: str,
    dtype: torch.dtype,
) -> None:
    """Write config.json and a safetensors file; both appear under their names only when whole."""
    folder = Path(folder)
    stored = {name: value.detach().to("cpu", dtype).contiguous() for name, value in weights.items()}
    write_bytes(folder / weights_name, save(stored, metadata={"format": "pt"}))
    write_json(folder / CONFIG_NAME, config, indent=2)


def require_file(path: Path) -> None:
    """Raise FileNotFoundError unless there is such a file."""
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer file not found: {path}")


def _listed(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if names[shown:] else "")
