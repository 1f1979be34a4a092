"""Weight files of metrics: told apart by a short hash, and never unpickled unsafely."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from diagd.unpickling import UNPICKLING_ERRORS


def short_sha256(path: str | Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256, as printed beside numbers it made."""
    with _existing(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Load a .pth state dict on the CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no state dict, or one that only code execution could load.
    """
    path = _existing(path)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except UNPICKLING_ERRORS:  # whose texts advise to execute the file
        raise ValueError(
            f"{path} is no state dict: damaged, or more than tensors in it: not loaded"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise ValueError(f"{path} is no state dict: expected names and tensors")
    return weights


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"weights not found: {path}")
    return path
