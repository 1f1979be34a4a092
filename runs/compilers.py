"""Time the kernels that the compilers at hand build for a kind of processor, side by side.

    python runs/compilers.py --march x86-64-v3 --out docs/results/avx2/compilers.json

    git worktree add ../before COMMIT
    python runs/compilers.py --compilers g++ --before ../before

All builds run the same steps in turns: raster's and k=1's, after one frame and a full context;
with another checkout, its kernels as well. Shares are of the memory and multiply rates that `diagd
bench` measures with the same instructions. Leave the machine alone.
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
from diagd.benchmark.bench import CACHE_BYTES
from diagd.benchmark.steps import StepTimes, bytes_read, flops, measure_ceilings
from diagd.decoding.model import CausalModel
from diagd.families.checkpoints import model_path, read_config
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.system import git_commit, provenance

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "g++-11", "g++-12", "g++-13", "g++-14", "clang++", "zig")
LIMITS = {  # what has PyTorch use no more than that
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
RATES = {  # whose products are timed; of bytes nothing is known here, as in `diagd bench`
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "int8": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class Options:
    """What is built and timed."""

    march: str = "native"  # for g++ and clang; x86-64-v3 is AVX2
    out: Path | None = None  # a JSON file
    models: tuple[str, ...] = ("doom", "mc-ar-42m")
    dtypes: tuple[NativeDType, ...] = ("float32", "bfloat16", "int8")
    seconds: float = 3.0  # for all builds, a kind of step
    lanes: tuple[int, ...] = ()  # of a step; 1 and a diagonal's at k=1
    compilers: tuple[str, ...] = COMPILERS
    before: Path | None = None  # another checkout


def main(options: Options) -> None:
    """Build, time and print; PyTorch has to start with its limits, so a process starts again."""
    limits = LIMITS.get(options.march, {})
    if any(os.environ.get(name) != value for name, value in limits.items()):
        command = [sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, **limits}).returncode)
    with TemporaryDirectory() as scratch:
        builds = build_all(options.compilers, options.march, Path(scratch))
        commits = {"now": git_commit(ROOT)}
        if options.before is not None:
            commits["before"] = git_commit(options.before)
            sources, folder = options.before / SOURCES.relative_to(ROOT), Path(scratch) / "before"
            folder.mkdir()
            older = build_all(options.compilers, options.march, folder, sources)
            builds |= {f"{name} before": build for name, build in older.items()}
        document = {
            "march": options.march,
            "limits": limits,
            **provenance(torch.device("cpu")),
            "commits": commits,
            "compilers": {name: version for name, (_, version) in builds.items()},
            "rows": [
                row
                for model in options.models
                for dtype in options.dtypes
                for row in time_builds(builds, model, dtype, options.seconds, options.lanes)
            ],
        }
    for row in document["rows"]:
        print(
            f"{row['model']:<10}{row['dtype']:<9}{row['by']:<12}{row['lanes']:>3} lanes after "
            f"{row['seen']:>4}: {1e3 * row['seconds']:7.2f} ms, {row['bandwidth_share']:4.0%} of "
            f"memory's rate, {row['flops_share']:4.0%} of multiplication's"
        )
    if options.out is not None:
        write_json(options.out, document, indent=1)


def build_all(
    compilers: tuple[str, ...], march: str, folder: Path, sources: Path = SOURCES
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
        files = map(str, sources.glob("*.cpp"))
        flags = [*FLAGS, f"-march={named}", *files, "-o", str(target)]
        if subprocess.run([*command, *flags], capture_output=True).returncode:
            print(f"{name} builds nothing here", file=sys.stderr)
            continue
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        builds[name] = ctypes.CDLL(str(target)), version.splitlines()[0]
    return builds


def time_builds(
    builds: dict[str, tuple[ctypes.CDLL, str]],
    name: str,
    dtype: NativeDType,
    budget: float,
    lanes_of_steps: tuple[int, ...] = (),
) -> list[dict[str, Any]]:
    """Time steps of a model by every build, and by PyTorch's kernels, in turns."""
    config = PRESETS[name] if name in PRESETS else read_config(model_path(name) / "config.json")
    ours = {
        by: NativeModel(Transformer.random(config), dtype, library=library)
        for by, (library, _) in builds.items()
    }
    weight_bytes = next(iter(ours.values())).weight_bytes
    models: dict[str, CausalModel] = {**ours}
    ceilings = measure_ceilings(torch.device("cpu"), *RATES[dtype])
    plain = Transformer.random(config, dtype=dtype_of(dtype))
    pytorch = {"pytorch": merge_linears(plain, can_pack(plain))} if dtype != "int8" else {}
    rows = []
    for frames in (1, config.frames_held - 1):
        for lanes in lanes_of_steps or (1, min(config.grid_height, config.grid_width)):
            seen = frames * config.tokens_per_frame + config.tokens_per_frame // 2
            seconds = in_turns(models, lanes, seen, budget)
            if pytorch:  # apart: its threads spin on the cores after they have computed
                seconds |= in_turns(pytorch, lanes, seen, budget / 4)
                time.sleep(1)
            one = StepTimes([], [lanes], [seen])
            read, done = (
                bytes_read(config, one, weight_bytes, CACHE_BYTES[dtype]),
                flops(config, one),
            )
            rows += [
                {
                    "model": name,
                    "dtype": dtype,
                    "by": by,
                    "lanes": lanes,
                    "seen": seen,
                    "seconds": (median := statistics.median(of)),
                    "least": min(of),
                    "bandwidth_share": read / median / ceilings.bytes_per_second,
                    "flops_share": done / median / ceilings.flops_per_second,
                }
                for by, of in seconds.items()
            ]
    return rows


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
