"""How our kernels are launched: whether early, and what parts of a product may count with."""

from functools import cache
from typing import Any

import torch

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
