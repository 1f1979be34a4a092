"""Time the kernels that the compilers at hand build for a kind of processor, side by side.

    python runs/compilers.py --march x86-64-v3 --out docs/results/compilers.json

All builds run the same steps in turns: raster's and k=1's, after one frame and a full context.
The multiply rate is what PyTorch reaches in a square product of float32 with the same instructions,
so the share of it says what the compiler made of the source. Leave the machine alone.
"""

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro

from diagd.backends.devices import dtype_of
from diagd.backends.linears import can_pack, merge_linears
from diagd.backends.native.compiler import FLAGS, SOURCES
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.backends.step_times import in_turns
from diagd.decoding.model import CausalModel
from diagd.families.checkpoints import model_path, read_config
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import provenance

COMPILERS = ("g++", "g++-11", "g++-12", "g++-13", "g++-14", "clang++", "zig")
LIMITS = {  # what has PyTorch use no more than that
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


@dataclass(frozen=True)
class Options:
    """What is built and timed."""

    march: str = "native"  # for g++ and clang; x86-64-v3 is AVX2
    out: Path | None = None  # a JSON file
    models: tuple[str, ...] = ("doom", "mc-ar-42m")
    dtypes: tuple[NativeDType, ...] = ("float32", "bfloat16", "int8")
    seconds: float = 3.0  # for all builds, a kind of step
    compilers: tuple[str, ...] = COMPILERS


def main(options: Options) -> None:
    """Build, time and print; PyTorch has to start with its limits, so a process starts again."""
    limits = LIMITS.get(options.march, {})
    if any(os.environ.get(name) != value for name, value in limits.items()):
        command = [sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, **limits}).returncode)
    with TemporaryDirectory() as scratch:
        builds = build_all(options.compilers, options.march, Path(scratch))
        document = {
            "march": options.march,
            "limits": limits,
            **provenance(torch.device("cpu")),
            "compilers": {name: version for name, (_, version) in builds.items()},
            "multiplied_per_second": multiply_rate(),
            "rows": [
                row
                for model in options.models
                for dtype in options.dtypes
                for row in time_builds(builds, model, dtype, options.seconds)
            ],
        }
    rate = document["multiplied_per_second"]
    for row in document["rows"]:
        row["share_of_rate"] = row["multiplied"] / row["seconds"] / rate
        print(
            f"{row['model']:<10}{row['dtype']:<9}{row['by']:<9}{row['lanes']:>3} lanes "
            f"after {row['seen']:>4}: {1e3 * row['seconds']:7.2f} ms, {row['share_of_rate']:4.0%}"
        )
    if options.out is not None:
        write_json(options.out, document, indent=1)


def build_all(
    compilers: tuple[str, ...], march: str, folder: Path
) -> dict[str, tuple[ctypes.CDLL, str]]:
    """Build with each compiler that is here; returns its library and what it says of itself."""
    builds = {}
    for name in compilers:
        command, named = [name], march
        if name == "zig":
            command, named = [sys.executable, "-m", "ziglang", "c++"], march.replace("-", "_")
        elif shutil.which(name) is None:
            continue
        target = folder / f"{name}.so"
        sources = map(str, SOURCES.glob("*.cpp"))
        flags = [*FLAGS, f"-march={named}", *sources, "-o", str(target)]
        if subprocess.run([*command, *flags], capture_output=True).returncode:
            print(f"{name} builds nothing here", file=sys.stderr)
            continue
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        builds[name] = ctypes.CDLL(str(target)), version.splitlines()[0]
    return builds


def multiply_rate() -> float:
    """Return how many multiplications a second a square product of float32 has, at best."""
    size, best = 2048, float("inf")
    matrix = torch.ones(size, size)
    for _ in range(10):
        since = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - since)
    return size**3 / best


def time_builds(
    builds: dict[str, tuple[ctypes.CDLL, str]], name: str, dtype: NativeDType, budget: float
) -> list[dict[str, Any]]:
    """Time steps of a model by every build, and by PyTorch's kernels, in turns."""
    config = PRESETS[name] if name in PRESETS else read_config(model_path(name) / "config.json")
    models: dict[str, CausalModel] = {
        by: NativeModel(Transformer.random(config), dtype, library=library)
        for by, (library, _) in builds.items()
    }
    plain = Transformer.random(config, dtype=dtype_of(dtype))
    pytorch = {"pytorch": merge_linears(plain, can_pack(plain))} if dtype != "int8" else {}
    rows = []
    for frames in (1, config.frames_held - 1):
        for lanes in (1, min(config.grid_height, config.grid_width)):
            seen = frames * config.tokens_per_frame + config.tokens_per_frame // 2
            seconds = in_turns(models, lanes, seen, budget)
            if pytorch:  # apart: its threads spin on the cores after they have computed
                seconds |= in_turns(pytorch, lanes, seen, budget / 4)
                time.sleep(1)
            rows += [
                {
                    "model": name,
                    "dtype": dtype,
                    "by": by,
                    "lanes": lanes,
                    "seen": seen,
                    "multiplied": lanes * multiplied(config, seen),
                    "seconds": statistics.median(of),
                    "least": min(of),
                }
                for by, of in seconds.items()
            ]
    return rows


def multiplied(config: ModelConfig, seen: int) -> int:
    """Count the multiplications of a lane that sees so many slots."""
    width = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    mlp = (3 if config.mlp == "swiglu" else 2) * config.intermediate_size
    layer = config.hidden_size * (2 * width + 2 * keys + mlp) + 2 * width * seen
    return config.num_layers * layer + config.hidden_size * config.vocab_size


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
