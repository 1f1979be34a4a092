"""Devices and number types by the names that people give them."""

from typing import Literal

import torch

DTypeName = Literal["float32", "bfloat16", "float16", "int8"]


def dtype_of(name: DTypeName) -> torch.dtype:
    """Return the torch dtype to load weights in; int8 ones are rounded from float32 later."""
    return torch.float32 if name == "int8" else getattr(torch, name)


def device_of(name: str) -> torch.device:
    """Return the device of that name, or raise ValueError where it is not to be had."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must look like cpu, cuda or cuda:0, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise ValueError(
            f"device {name!r} is not available: {torch.cuda.device_count()} CUDA devices"
        )
    return device
