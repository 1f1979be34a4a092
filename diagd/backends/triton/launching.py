"""How our kernels are launched: whether early, and what parts of a product may count with."""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false

from functools import cache
from typing import Any

import torch

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton for ROCm alone, never tried; there no kernel starts early
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_settings", "starts_early"]

MAX_COUNTERS = 2**16  # outputs whose parts are added by the last program, in one launch
FIRST_EARLY = (9, 0)  # capability from which a kernel may start before the one before has ended


@cache
def starts_early(device: torch.device) -> bool:
    """Return whether a device has programmatic dependent launch: NVIDIA's from Hopper on."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None and torch.version.cuda
    return bool(is_nvidia) and torch.cuda.get_device_capability(device) >= FIRST_EARLY


def launch_settings(dependent: bool) -> dict[str, Any]:
    """Return what Triton is told of a launch; the word is unknown to other backends of Triton."""
    return {"launch_pdl": True} if dependent else {}
