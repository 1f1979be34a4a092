"""The kernels of other platforms' wheels, run here by emulators, where those are installed.

Debian's qemu-user with libc6-arm64-cross, and wine64. There is no Python in them: `smoke.cpp` runs
a model, and compares the bits of steps of one lane with those of more, on one thread and on three.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diagd.backends.devices import cpu_features
from diagd.backends.native.compiler import FLAGS, find_compiler
from diagd.backends.native.library import VARIANTS, find_or_make
from runs import wheels

PROGRAM = Path(__file__).parent / "smoke.cpp"
EMULATORS = {  # names of the program, and its flags
    "linux-x86_64": (("env",), ()),
    "linux-arm64": (("qemu-aarch64", "qemu-aarch64-static"), ("-L", "/usr/aarch64-linux-gnu")),
    "windows-x86_64": (("wine64", "/usr/lib/wine/wine64"), ()),
}
# Of the largest logit: parts of sums in bfloat16 differ, and what activations become for int8.
TOLERANCE = {"f32": 0.02, "bf16": 0.02, "int8": 0.04, "int8-two-digits": 0.02}
RUNNABLE = {name for name, needs in VARIANTS.items() if all(map(cpu_features().get, needs))}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the emulators are Linux programs")
@pytest.mark.parametrize("platform", EMULATORS)
def test_kernels_of_a_platform_compute_what_those_of_this_machine_do(platform, tmp_path):
    pytest.importorskip("ziglang")
    names, flags = EMULATORS[platform]
    emulator = next((path for name in names if (path := shutil.which(name))), None)
    if emulator is None:
        pytest.skip(f"needs {' or '.join(names)}")
    folder = wheels.ROOT / "build" / "kernels" / platform
    wheels.compile_kernels(wheels.PLATFORMS[platform], folder)
    here = build_program("linux-x86_64", tmp_path / "here")
    there = build_program(platform, tmp_path / "there.exe")
    expected = logits_of([here], find_or_make(), tmp_path)
    for name in RUNNABLE & set(wheels.PLATFORMS[platform].variants):
        library = folder / f"{name}.so"
        if platform == "linux-x86_64":  # attention that trains, too
            self_test = "diagd.backends.native.self_test"
            subprocess.run([sys.executable, "-m", self_test, library], check=True)
        logits = logits_of([emulator, *flags, there], library, tmp_path)
        for weights, values in expected.items():
            error = (logits[weights] - values).abs().max() / values.abs().max()
            assert error <= TOLERANCE[weights], (name, weights)


def test_the_program_is_written_for_the_records_of_the_kernels():
    if (compiler := find_compiler()) is None:
        pytest.skip("no C++ compiler here")
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", PROGRAM], check=True)


def build_program(platform, target):
    command = [sys.executable, "-m", "ziglang", "c++", "-target", wheels.PLATFORMS[platform].zig]
    command += ["-mcpu=baseline", *(flag for flag in FLAGS if flag != "-shared")]
    command += [PROGRAM, "-o", target]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return target


def logits_of(program, library, folder):
    """Run the program on a library; returns the logits of each type of weights."""
    done = subprocess.run(
        [*map(str, (*program, library))],
        env=os.environ | {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"},
        capture_output=True,
        text=True,
        check=True,
    )
    logits = {}
    for line in done.stdout.splitlines():
        weights, value = line.split()
        logits.setdefault(weights, []).append(float(value))
    return {weights: torch.tensor(values) for weights, values in logits.items()}
