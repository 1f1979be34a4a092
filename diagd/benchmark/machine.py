"""What a machine is, what of diagd will run on it, and how fast the bundled world is there."""

import itertools
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from diagd.backends.devices import cpu_features, multiplies_bfloat16
from diagd.backends.native.compiler import find_compiler
from diagd.backends.native.cores import usable_cores
from diagd.backends.native.library import (
    cache_folder,
    candidates_tried,
    load_library,
    say_origin,
)
from diagd.backends.prepare import choose_dtype, time_candidates
from diagd.backends.triton.kernels import why_not_on
from diagd.data.video import read_video
from diagd.extras import EXTRAS, missing_modules
from diagd.families.checkpoints import model_path
from diagd.families.own_format import read_config
from diagd.pipeline.generator import VideoGenerator
from diagd.provenance import cpu_name

WORLD = "doom"
INSTRUCTIONS = {  # by torch's names of capabilities
    "avx2": "AVX2",
    "avx512_f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "sve": "SVE",
    "sve2": "SVE2",
}
BUSY_SHARE = 0.25  # of the processor; with more of it taken by others, times say little


def machine_facts() -> dict[str, Any]:
    """Return versions, processor, memory and what is in use of them now."""
    others = psutil.cpu_percent(interval=1.0) / 100  # while this process sleeps
    memory, load = psutil.virtual_memory(), psutil.getloadavg()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpu_name(),
        "instructions": instructions(),
        "threads": torch.get_num_threads(),
        "cores_allowed": usable_cores(),
        "load_average": [round(value, 2) for value in load],
        "used_by_others": others,
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return what a GPU is, what of its memory is free, and the versions that drive it."""
    free, whole = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_bytes": whole,
        "memory_free_bytes": free,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return None
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def instructions() -> list[str]:
    """Name the vector and matrix instructions of the processor."""
    features = cpu_features()
    names = [name for feature, name in INSTRUCTIONS.items() if features.get(feature)]
    level = torch.backends.cpu.get_cpu_capability()  # what there is where torch tells no more
    if not names and level != "DEFAULT":
        names = [level]
    return ["NEON"] * (platform.machine() in ("arm64", "aarch64")) + names


def kernel_facts() -> dict[str, Any]:
    """Return where the kernels come from that run here, or why none do, and what is kept.

    They are built, tested and timed now if that was not done before; `tried` is how each did.
    """
    origin = problem = None
    try:
        load_library()
        origin = say_origin()
    except OSError as error:
        problem = str(error)
    files = [path for path in cache_folder().glob("kernels-*") if path.is_file()]
    return {
        "compiler": find_compiler(),
        "origin": origin,
        "problem": problem,
        "tried": candidates_tried(),
        "cache": str(cache_folder()),
        "cached_builds": len(files),
        "cached_bytes": sum(path.stat().st_size for path in files),
    }


def choices(device: torch.device) -> dict[str, Any]:
    """Return what `auto` is for the bundled world: backend and number type, each with the reason.

    On the CPU `candidates` says how long a step takes for all that could run it.
    """
    if device.type == "cuda":
        reason, unit = why_not_on(device), torch.cuda.get_device_name(device)
        backend = "triton", "our Triton kernels, in captured steps"
        if reason is not None:
            backend = "cuda-graph", f"captured steps of PyTorch's kernels; triton: {reason}"
        dtype = "float32", "nothing here multiplies bfloat16 faster"
        if multiplies_bfloat16(device):
            dtype = "bfloat16", f"multiplied by {unit}"
        timed = []
    else:
        config = read_config(model_path(WORLD) / "config.json")
        timed = time_candidates(config)
        name = choose_dtype("auto", device, config)
        best = min((one for one in timed if one.dtype == name), key=lambda one: one.times.cost)
        backend = best.backend, "the fastest of the candidates in this type"
        dtype = name, "bfloat16 where that takes a tenth less time than float32"
    return {
        "backend": {"name": backend[0], "why": backend[1]},
        "dtype": {"name": dtype[0], "why": dtype[1]},
        "candidates": [
            {"backend": one.backend, "dtype": one.dtype, **one.times._asdict()} for one in timed
        ],
    }


def extras_here() -> dict[str, list[str]]:
    """Return the modules that each extra lacks; an empty list is an extra that is there."""
    return {name: missing_modules(modules) for name, modules in EXTRAS.items()}


def probe_speed(
    device: torch.device, dtype: torch.dtype, seconds: float, strategies: tuple[str, ...]
) -> dict[str, float]:
    """Dream with the bundled world for so many seconds; return frames a second, pixels included.

    Each strategy has its share of the time, and a frame before it that is not timed.
    """
    world = VideoGenerator.from_pretrained(WORLD, device, dtype)
    assert world.vocabulary is not None
    start = read_video(model_path(WORLD) / "prompt.mp4").frames[-1:]
    speeds = {}
    for strategy in strategies:
        frames = world.stream(start, itertools.repeat(world.vocabulary.names[1]), strategy=strategy)
        next(frames)
        started, count = time.monotonic(), 0
        while not count or time.monotonic() - started < seconds / len(strategies):
            next(frames)
            count += 1
        speeds[strategy] = count / (time.monotonic() - started)
    return speeds
