"""Devices and number types by the names that people give them, and the best of them here."""

from collections.abc import Mapping

import torch

from diagd.backends.names import DTypeName


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether products of bfloat16 numbers are an instruction of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    features = cpu_features()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def cpu_features() -> Mapping[str, object]:
    """Return what torch knows of the processor, such as `{"amx_bf16": True}`."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    queries = {
        "avx2": "_is_avx2_supported",
        "avx512_vl": "_is_avx512_supported",
        "avx512_vnni": "_is_vnni_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_int8": "_is_amx_tile_supported",
    }
    return {unit: getattr(torch.cpu, query, bool)() for unit, query in queries.items()}


def dtype_of(name: DTypeName) -> torch.dtype:
    """Return the torch dtype to load weights in; int8 ones are rounded from float32 later."""
    dtype = torch.float32 if name == "int8" else getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be one of torch or a name such as bfloat16, got {name!r}")
    return dtype


def device_of(name: str) -> torch.device:
    """Return the device of that name, or raise ValueError where it is not to be had."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must look like cpu, cuda or cuda:0, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r} is not available: {count} CUDA devices")
    return device
