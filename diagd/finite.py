"""Weights are finite numbers, or refused when they are loaded, whosever they are."""

from pathlib import Path

import torch
from torch import Tensor


def as_finite(
    weight: Tensor,
    where: str | Path,
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a weight in a type, on a device; to look at it is one pass, and allocates nothing.

    Args:
        where: what holds it, for the message.

    Raises:
        ValueError: It holds NaN or infinity, or nothing that the type can hold (sparse, of four
            bits); names the file and the tensor.
    """
    try:
        numbers = weight.to(device, dtype)
        ends = torch.stack(numbers.aminmax()) if numbers.numel() else numbers  # NaN where any is
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where}: {name} in {weight.dtype} cannot be used: {reason}") from None
    if not ends.isfinite().all():
        raise ValueError(f"{where}: {name} holds NaN or infinity (in {dtype})")
    return numbers
