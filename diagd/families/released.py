"""Recognise a released checkpoint by its tensors, and say in our words what it is.

A file may be a PyTorch checkpoint or safetensors. A config in the original field names, given or
found beside it (`config.json`, `config.yaml`), is honoured.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from diagd.families import table
from diagd.families.family import Checkpoint, ReleasedFormat, Source
from diagd.models.torch_files import read_torch_file, tensors_of
from diagd.models.weight_files import read_weights

_SIDE_FILES = ("config.json", "config.yaml", "config.yml")
# what tensors and configs of other shapes and types than a family's come to
_MISFITS = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError


def released_formats() -> list[ReleasedFormat]:
    """Return the formats of all families' released checkpoints."""
    return [family.released for family in table.FAMILIES if family.released]


def file_patterns() -> list[str]:
    """Return the glob patterns of released checkpoints, whatever the family."""
    patterns = (pattern for released in released_formats() for pattern in released.files)
    return list(dict.fromkeys(patterns))


def read_released(path: Path, config: Path | None = None) -> Checkpoint:
    """Read a released checkpoint, a file or the only one in a folder; weights stay on disk.

    Args:
        config: a config file in the original field names, instead of the one beside the weights.

    Raises:
        FileNotFoundError: No such file, or a folder without a checkpoint.
        ValueError: A damaged file, a folder of several, tensors that no family knows or that do
            not fit their family (named).
    """
    file = _find_checkpoint(path)
    source = _read_source(file, config)
    for family in table.FAMILIES:
        if family.released and family.released.recognises(source.tensors):
            try:
                renamed = family.released.convert(source)
            except _MISFITS as error:
                reason = f"no {error} in it" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{file}: {family.name} checkpoint: {reason}") from None
            return Checkpoint(family, file, renamed.config, renamed.weights, source)
    names = ", ".join(family.name for family in table.FAMILIES)
    shown = ", ".join(list(source.tensors)[:3]) or "no tensors at all"
    raise ValueError(f"{file}: no checkpoint of {names}: it holds {shown}")


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
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # too long a number, too deep
        raise ValueError(f"{path}: not valid {kind}: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a {kind} object, got {type(values).__name__}")
    return values


def _find_checkpoint(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: file not found")
    patterns = file_patterns()
    found = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"{path}: no checkpoint: expected one of {', '.join(patterns)}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: several checkpoints ({names}): name the one you mean")
    return found[0]


def _read_source(path: Path, config: Path | None) -> Source:
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
