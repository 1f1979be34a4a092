"""Compile our kernels, as a step launches them, for a GPU that is not there; nothing runs.

    python -m tests.backends.triton.compiling 90      # JSON, a line for each kernel

The functions that launch are called with tensors of true sizes on the CPU; Triton's launch is
stopped after it has compiled. What a kernel uses is read from the binary by NVIDIA's `cuobjdump`,
which the Triton wheel brings.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

HALF = torch.bfloat16
STEPS = {  # query heads, key heads, head size, lanes, slots, type
    "cosmos k=1": (32, 8, 128, 65, 12800, HALF),
    "cosmos raster": (32, 8, 128, 1, 12800, HALF),
    "mc-ar-300m k=1": (16, 4, 64, 14, 5552, HALF),
    "wham-1.6b k=1": (18, 18, 128, 18, 5560, HALF),
    "heads of 80": (8, 4, 80, 20, 1000, torch.float16),
    "heads of 256": (8, 4, 256, 20, 1000, HALF),
    "float32": (32, 8, 128, 65, 12800, torch.float32),
}
DRAWS = {  # vocabulary, type, temperature, top_k, top_p, exclusive, ranges by place
    "cosmos greedy": (64000, HALF, 0.0, 0, 1.0, False, False),
    "cosmos sampled": (64000, HALF, 1.0, 0, 1.0, False, False),
    "mc-ar top-p": (8262, HALF, 1.0, 0, 0.8, False, False),
    "wham": (16452, HALF, 0.9, 0, 0.97, True, True),
    "everything": (8262, torch.float32, 1.0, 50, 0.8, False, True),
}


class Absent:
    """What Triton asks of the driver of a GPU when it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the number of the only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """Return the number of the only one."""
        return 0


def usage(kernel: Any) -> dict[str, int]:
    """Return registers, and bytes of stack, local (both: spills) and shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
    }


def main(capability: int) -> None:
    """Compile every kernel of STEPS and DRAWS for a capability, such as 90."""
    triton.runtime.driver.set_active(Absent(capability))
    compiled: list[Any] = []
    launch = JITFunction.run

    def stop(self: Any, *arguments: Any, **settings: Any) -> None:
        compiled.append(launch(self, *arguments, **{**settings, "warmup": True}))

    JITFunction.run = stop
    from diagd.backends.triton.attention import attend_slots, rotate_and_store
    from diagd.backends.triton.sampling import draw

    def report(case: str) -> None:
        for kernel in compiled:
            row = {"case": case, "kernel": kernel.metadata.name, **usage(kernel)}
            print(json.dumps(row), flush=True)
        compiled.clear()

    for case, (heads, kv_heads, size, lanes, slots, dtype) in STEPS.items():
        queries = torch.empty(1, lanes, heads, size, dtype=dtype).transpose(1, 2)
        cached = torch.empty(2, 1, kv_heads, slots + 1, size, dtype=dtype)[:, :, :, :slots]
        at, held = (torch.zeros(1, count, dtype=torch.int64) for count in (lanes, slots))
        attend_slots(queries, *cached, at, at, held, held)
        turns = torch.empty(2, 1, lanes, size // 2, dtype=dtype)
        rotate_and_store(queries, *cached[:, :, :, :lanes], *turns, at, *cached)
        report(case)
    for case, (vocab_size, dtype, temperature, top_k, top_p, exclusive, by_place) in DRAWS.items():
        lane = torch.zeros(1, 14, dtype=torch.int64)
        places = torch.zeros(3, 5, 2, dtype=torch.int64) if by_place else None
        logits = torch.empty(1, 14, vocab_size, dtype=dtype)
        rest = lane[:, 0], lane, lane, lane, temperature, top_k, top_p, exclusive
        draw(logits, places, 0, vocab_size, *rest)
        report(case)


if __name__ == "__main__":
    main(int(sys.argv[1]))
