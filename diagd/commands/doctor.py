"""Report what this machine is, what of diagd will run on it and why, and how fast that is.

diagd doctor                   # some ten seconds, five of them a probe
diagd doctor --seconds 0       # no probe
"""

import itertools
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from rich.box import SIMPLE
from rich.table import Table

from diagd.backends.devices import cpu_features, device_of, dtype_of, multiplies_bfloat16
from diagd.backends.native.compiler import find_compiler
from diagd.backends.native.library import (
    cache_folder,
    candidates_tried,
    load_library,
    say_origin,
)
from diagd.backends.prepare import choose_dtype, time_candidates
from diagd.backends.triton.model import why_not_on
from diagd.benchmark.options import DoctorOptions
from diagd.console import make_console, waiting
from diagd.data.video import read_video
from diagd.extras import EXTRAS, missing_modules
from diagd.families.checkpoints import model_path, read_config
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator
from diagd.system import cpu_name, usable_cores

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


STRATEGIES = ("raster", "k=1")


def main(options: DoctorOptions) -> dict[str, Any]:
    """Look, measure, say what it means."""
    device = device_of(options.device)
    with waiting("looking at this machine"):
        machine, kernels = machine_facts(), kernel_facts()
        chosen = choices(device)
    report: dict[str, Any] = {
        "device": str(device),
        "machine": machine,
        "gpu": gpu_facts(device) if device.type == "cuda" else None,
        "kernels": kernels,
        "choices": chosen,
        "extras": extras_here(),
        "frames_per_second": {},
        "warnings": _warnings(machine, kernels),
    }
    for name, text in _lines(report).items():
        _say(name, text)
    if chosen["candidates"]:
        _print_candidates(chosen)
    for warning in report["warnings"]:
        _say("warning", warning)
    if options.seconds:
        dtype = dtype_of(chosen["dtype"]["name"])
        with waiting(f"dreaming for {options.seconds:g} seconds"):
            speeds = probe_speed(device, dtype, options.seconds, STRATEGIES)
        report["frames_per_second"] = speeds
        for strategy, speed in speeds.items():
            _say(strategy, f"{speed:.2f} frames/s with the bundled model ({WORLD})")
        _say("in short", _verdict(speeds["raster"], speeds["k=1"]))
    return report


def _warnings(machine: dict[str, Any], kernels: dict[str, Any]) -> list[str]:
    warnings = []
    if machine["used_by_others"] > BUSY_SHARE:
        warnings.append(
            f"other programs use {machine['used_by_others']:.0%} of the processor: "
            "expect less speed than when it is left alone, and measure nothing now"
        )
    if machine["threads"] > machine["cores_allowed"]:
        warnings.append(
            f"{machine['threads']} threads share {machine['cores_allowed']:g} cores: "
            f"try --threads {max(1, int(machine['cores_allowed']))}"
        )
    if kernels["problem"]:
        warnings.append(f"our kernels cannot run: {kernels['problem']}")
    return warnings


def _lines(report: dict[str, Any]) -> dict[str, str]:
    """Say a fact in each line."""
    machine, kernels, chosen = report["machine"], report["kernels"], report["choices"]
    gigabytes = [machine[f"memory{part}_bytes"] / 2**30 for part in ("", "_available")]
    kept = f"{kernels['cached_builds']} kept, {kernels['cached_bytes'] / 2**20:.1f} MiB"
    there = [name for name, missing in report["extras"].items() if not missing]
    lacking = [f"{name} ({', '.join(m)})" for name, m in report["extras"].items() if m]
    gpu = {"gpu": gpu_line(report["gpu"])} if report["gpu"] else {}
    return {
        "python": f"{machine['python']}, torch {machine['torch']}, {machine['system']}",
        "processor": f"{machine['processor']}: {', '.join(machine['instructions']) or 'no SIMD'}",
        "threads": f"{machine['threads']} for {machine['cores_allowed']:g} cores; "
        f"others use {machine['used_by_others']:.0%}, "
        f"load {' '.join(map(str, machine['load_average']))}",
        "memory": f"{gigabytes[0]:.1f} GiB, {gigabytes[1]:.1f} GiB free",
        **gpu,
        "compiler": kernels["compiler"] or "none",
        "kernels": f"{kernels['origin'] or 'none'}; {kept} in {kernels['cache']}",
        "backend": "{name}: {why}".format(**chosen["backend"]),
        "dtype": "{name}: {why}".format(**chosen["dtype"]),
        "extras": ", ".join(there) or "none",
        "missing": ", ".join(lacking) or "nothing",
    }


def gpu_line(gpu: dict[str, Any]) -> str:
    """Say what a GPU is (see `gpu_facts`)."""
    gigabytes = [gpu[f"memory_{part}bytes"] / 2**30 for part in ("", "free_")]
    return (
        f"{gpu['name']}, {gigabytes[0]:.1f} GiB, {gigabytes[1]:.1f} GiB free; capability "
        f"{gpu['capability']}, driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}, "
        f"Triton {gpu['triton'] or 'none'}"
    )


def _print_candidates(chosen: dict[str, Any]) -> None:
    table = Table("ms a step", "one lane", "a diagonal", "", box=SIMPLE)
    for one in chosen["candidates"]:
        pair = one["backend"], one["dtype"]
        auto = pair == (chosen["backend"]["name"], chosen["dtype"]["name"])
        note = "auto" if auto else "--dtype int8" if one["dtype"] == "int8" else ""
        times = (f"{one[name]:.2f}" for name in ("raster_ms", "diagonal_ms"))
        table.add_row(" ".join(pair), *times, note)
    make_console().print(table, "(two layers of the bundled model)", sep="")


def _verdict(raster: float, speed: float) -> str:
    """Say what frames a second in raster order, and along diagonals, mean for who wants to play."""
    real_time, slow = GenerationDefaults().fps, ""
    if speed <= raster:
        slow = f"; k=1 is no faster than raster order ({speed / raster:.1f} times): a defect, "
        slow += "please report it with the lines above"
    if speed >= real_time:
        return f"fast enough to play in real time ({real_time:g} frames/s){slow}"
    if speed >= real_time / 4:
        real = f"slower than real time ({real_time:g}/s)"
        return f"playable, {real_time / speed:.1f} times {real}{slow}"
    behind = f"{real_time / speed:.0f} times slower than real time ({real_time:g}/s)"
    return f"{behind}: good for videos; int8 and --model maze are faster{slow}"


def _say(name: str, text: str) -> None:
    make_console().print(f"{name:<11}{text}", soft_wrap=True)
