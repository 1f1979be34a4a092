"""TorchScript files, which run code: load one only from whom you trust."""

import warnings
from pathlib import Path
from typing import Any

import torch


def load_torchscript(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """Load the program in a file for inference. This EXECUTES code that the file contains.

    Raises:
        ValueError: No TorchScript, or no such file.
    """
    try:
        with warnings.catch_warnings():  # it is deprecated; what was released stays
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
            return torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].partition(". This is an internal")[0]
        raise ValueError(f"{path} is no TorchScript file (corrupt?): {reason}") from None
