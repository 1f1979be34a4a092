"""Launch a step's kernels, compiled for a GPU that is not there; nothing runs.

    python -m tests.backends.triton.compiling 90          # JSON, a line for each kernel
    python -m tests.backends.triton.compiling launches    # JSON, a line for each model

A step is taken over tensors of true sizes that have no memory (device `meta`). Triton's launch is
stopped after it has compiled. What a kernel uses is read from the binary by NVIDIA's `cuobjdump`,
which the Triton wheel brings; what it loads, and when, from its PTX (`ptx.py`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diagd.backends.linears import merge_linears, round_linears
from diagd.backends.triton.model import TritonModel
from diagd.decoding.model import Drawing, Step
from diagd.decoding.sampling import SamplingOptions, ValidRanges
from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from tests.backends.triton.ptx import WAIT, accesses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EARLY = 90  # capability from which kernels start before the one before has ended


class Case(NamedTuple):
    """Steps of a model to compile."""

    preset: str
    dtype: torch.dtype
    lanes: tuple[int, ...]
    int8: bool = False


CASES = (
    Case("mc-ar-doom", BF16, (14,)),
    Case("mc-ar-300m", BF16, (1, 14, 65, 128)),
    Case("mc-ar-300m", FP16, (40,)),
    Case("mc-ar-300m", FP32, (14,)),
    Case("mc-ar-300m", BF16, (1, 65), int8=True),
    Case("wham-1.6b", BF16, (18, 40)),
    Case("cosmos-4b", BF16, (65,)),
    Case("cosmos-4b", BF16, (1,), int8=True),
    Case("llamagen-3b", BF16, (2,)),
    Case("chameleon-7b", BF16, (32,)),
    Case("glm-image-9b", BF16, (1, 32)),
)

LAUNCHED = "mc-ar-doom", "mc-ar-300m", "wham-1.6b", "cosmos-4b"


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


@contextmanager
def stopped(launch: Callable[..., Any]) -> Iterator[None]:
    """Call a function instead of each launch of a kernel."""
    own, JITFunction.run = JITFunction.run, lambda *given, **settings: launch(*given, **settings)
    try:
        yield
    finally:
        JITFunction.run = own


def take_step(
    config: ModelConfig,
    case: Case,
    lanes: int,
    dependent: bool,
    mode: AbstractContextManager[Any],
) -> None:
    """Take a sampled step of a model that has shapes and no memory, in a mode of PyTorch's."""
    with torch.device("meta"), torch.no_grad():
        plain = Transformer(config).to(device="meta", dtype=case.dtype)
        merged = merge_linears(plain, pack=False)
        merged = round_linears(merged, case.dtype) if case.int8 else merged
        model, slots = TritonModel(merged, dependent), config.max_positions + 1
        text = torch.empty(1, 77, config.context_size) if config.context_size else None
        space = model.make_buffers(1, slots, text)
        ranges = ValidRanges(0, config.image_vocab_size, None)
        step = Step(space, (Drawing(1, SamplingOptions(1.0, top_p=0.8), ranges),))
        packed = torch.zeros(11 if config.on_grid else 8, 1, lanes, dtype=torch.int64)
        run = model.make_step(step)
        assert run is not None
        with mode:
            run([packed], slots - 1)


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


def compile_all(capability: int) -> None:
    """Compile every kernel of one layer of CASES for a capability, such as 90."""
    triton.runtime.driver.set_active(Absent(capability))
    launch, found = JITFunction.run, set[str]()

    def compile_only(self: Any, *arguments: Any, **settings: Any) -> None:
        kernel = launch(self, *arguments, **{**settings, "warmup": True})
        if kernel.hash in found:
            return
        found.add(kernel.hash)
        row = {"case": name, "kernel": kernel.metadata.name, **usage(kernel)}
        if WAIT in kernel.asm["ptx"]:
            row |= accesses(kernel.asm["ptx"], kernel.src.signature)
        print(json.dumps(row), flush=True)

    with stopped(compile_only):
        for case in CASES:
            one = replace(PRESETS[case.preset], num_layers=1)
            for lanes in case.lanes:
                name = f"{case.preset}, {case.dtype}, {lanes} lanes{', int8' * case.int8}"
                take_step(one, case, lanes, capability >= EARLY, nullcontext())


class Launches(TorchDispatchMode):
    """Count what a step launches: our kernels by name, and PyTorch's operators but views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.counts[f"torch.{name}"] += not (func.is_view or name in NO_LAUNCH)
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, *_: Any, **__: Any) -> None:
        """Count one of ours."""
        self.counts[kernel.__name__] += 1


NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "lift_fresh")  # memory, and no views by name


def count_launches() -> None:
    """Count the launches of whole steps, by name."""
    for preset, int8 in itertools.product(LAUNCHED, (False, True)):
        count, case = Launches(), Case(preset, BF16, (14,), int8)
        with stopped(count.launch):
            take_step(PRESETS[preset], case, 14, True, count)
        counts = {name: number for name, number in count.counts.items() if number}
        print(json.dumps({"preset": preset, "int8": int8, "launches": counts}))


if __name__ == "__main__":
    count_launches() if sys.argv[1] == "launches" else compile_all(int(sys.argv[1]))
