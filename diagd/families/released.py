"""Recognise a released checkpoint by its tensors, and say in our words what it is.

A file may be a PyTorch checkpoint or safetensors. A config in the original field names, given or
found beside it (`config.json`, `config.yaml`), is honoured.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from diagd.families.cosmos.weights import COSMOS
from diagd.families.mineworld.weights import MINEWORLD
from diagd.families.naming import Renamed, Source
from diagd.families.wham.weights import WHAM
from diagd.models.torch_files import read_torch_file, tensors_of
from diagd.models.weight_files import read_weights

FAMILIES = (WHAM, COSMOS, MINEWORLD)
_SIDE_FILES = ("config.json", "config.yaml", "config.yml")
_PATTERNS = ("model.pt", "*.ckpt", "model.safetensors", "pytorch_model.bin")


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint file of a folder, or the file given.

    Raises:
        FileNotFoundError: Nothing there, or a folder without a checkpoint.
        ValueError: A folder with several of them.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: file not found")
    found = [file for pattern in _PATTERNS for file in sorted(path.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"{path}: no checkpoint: expected one of {', '.join(_PATTERNS)}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: several checkpoints ({names}): name the one you mean")
    return found[0]


def read_source(path: Path, config: Path | None = None) -> Source:
    """Read a checkpoint file and its side file.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged, or refused (named).
    """
    side = config or next(
        (path.with_name(name) for name in _SIDE_FILES if path.with_name(name).is_file()), None
    )
    fields = {} if side is None else read_side(side)
    if path.suffix == ".safetensors":
        return Source(read_weights(path), {}, fields)
    content = read_torch_file(path)
    hyper_parameters = content.get("hyper_parameters")
    return Source(
        tensors_of(content), hyper_parameters if isinstance(hyper_parameters, dict) else {}, fields
    )


def convert_source(path: Path, source: Source) -> Renamed:
    """Rename a checkpoint's tensors and tell its config.

    Raises:
        ValueError: No family knows these tensors, or the file does not fit its family (named).
    """
    for family in FAMILIES:
        if family.recognises(source.tensors):
            try:
                return family.convert(source)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"no {error} in it" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}: {family.name} checkpoint: {reason}") from None
    names = ", ".join(family.name for family in FAMILIES)
    shown = ", ".join(list(source.tensors)[:3]) or "no tensors at all"
    raise ValueError(f"{path}: no checkpoint of {names}: it holds {shown}")


def read_side(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML config file; tags that would build objects are refused.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not JSON or YAML, or no mapping.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid {kind}: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a {kind} object, got {type(values).__name__}")
    return values
