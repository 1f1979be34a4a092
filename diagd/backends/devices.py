"""Devices and number types by name, and the best of them on this machine."""

from collections.abc import Mapping

import torch

from diagd.backends.names import DTypeName


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has instructions for bfloat16 products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    features = cpu_features()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def cpu_features() -> Mapping[str, object]:
    """Return torch's features of the processor, such as `{"amx_bf16": True}`."""
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
    """Return the torch dtype to load weights in; int8 weights are quantized from float32 later."""
    dtype = torch.float32 if name == "int8" else getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch dtype or a name such as bfloat16, got {name!r}")
    return dtype


def device_of(name: str) -> torch.device:
    """Return the device of a name, or raise ValueError if it is not available."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must look like cpu, cuda or cuda:0, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r} is not available, got {count} CUDA devices")
    return device
