"""Weights as safetensors: read mapped into memory, written one tensor at a time.

Neither reading nor writing ever holds all weights at once, so a checkpoint far larger than the
memory can be converted.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diagd.files import replacing

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not a safetensors file, or a truncated one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file: {error}") from None


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write floating-point tensors, in their own types, under the path only when all are there."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, weight in weights.items():
        end = offset + weight.numel() * weight.element_size()
        header[name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights.values():
            plain = weight.detach().cpu().contiguous().reshape(-1)
            file.write(plain.view(torch.uint8).numpy().data)
