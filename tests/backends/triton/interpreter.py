"""Where the kernels' values are tested: on a GPU, or with Triton's interpreter, which is NumPy.

make test-triton
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="no Triton here: see make test-triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
if DEVICE.type == "cpu" and not INTERPRETS:
    pytest.skip("no GPU here: make test-triton", allow_module_level=True)


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16 numbers, not the integers that have their bits."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    builder: Any = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.data.dtype != np.uint16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, triton.language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(builder, "create_dot", create_dot)
