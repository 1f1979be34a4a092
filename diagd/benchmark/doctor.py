"""Report this machine's hardware, the kernels that run on it, and a world's speed.

diagd doctor                   # ten seconds, half of them a speed probe
diagd doctor --seconds 0       # no probe
diagd doctor --model maze      # choose backend and dtype for another model
diagd doctor --again           # ignore stored timings; needs a quiet machine
"""

import itertools
import platform
import subprocess
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from diagd.backends.devices import cpu_features, device_of, dtype_of
from diagd.backends.native.compiler import find_compiler
from diagd.backends.native.library import cache_folder, candidates_tried, load_library, say_origin
from diagd.backends.prepare import BUSY_SHARE, choose_dtype, time_again, time_candidates
from diagd.backends.triton.launching import starts_early
from diagd.backends.triton.model import why_not_on
from diagd.benchmark.bench import draw_inputs, engine_rows, report_rows
from diagd.benchmark.options import DoctorOptions
from diagd.benchmark.steps import measure_ceilings
from diagd.console import make_console, print_table, waiting
from diagd.data.video import read_video
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Raster
from diagd.extras import EXTRAS, missing_modules
from diagd.families.checkpoints import find_model, load_model
from diagd.families.defaults import GenerationDefaults
from diagd.metrics.detectors import PUBLISHED
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import WorldSource
from diagd.system import cpu_name, usable_cores, usable_memory
from diagd.threads import LOOK_S, Neighbours, follow_free_cores, threads_from

INSTRUCTIONS = {  # by torch's names of capabilities
    "avx2": "AVX2",
    "avx512_f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "sve": "SVE",
    "sve2": "SVE2",
}
PROBED_STEPS = 60  # of a frame in raster order


def machine_facts() -> dict[str, Any]:
    """Return versions, processor, memory, and how much of them is in use."""
    neighbours = Neighbours()
    time.sleep(LOOK_S)
    others = neighbours.share()
    follow_free_cores()
    memory, features = usable_memory(), cpu_features()
    instructions = [name for feature, name in INSTRUCTIONS.items() if features.get(feature)]
    level = torch.backends.cpu.get_cpu_capability()  # coarser, of an older torch
    if not instructions and level != "DEFAULT":
        instructions = [level]
    return {
        "diagd": import_module("diagd").__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpu_name(),
        "instructions": ["NEON"] * (platform.machine() in ("arm64", "aarch64")) + instructions,
        "threads": torch.get_num_threads(),
        "threads_from": threads_from(),
        "cores_allowed": usable_cores(),
        "load_average": [round(value, 2) for value in psutil.getloadavg()],
        "used_by_others": others,
        "memory_bytes": memory,
        "memory_available_bytes": min(memory, psutil.virtual_memory().available),
    }


def gpu_facts(device: torch.device) -> dict[str, Any]:
    free, whole = torch.cuda.mem_get_info(device)
    driver = triton = None
    with suppress(FileNotFoundError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        driver = lines[0] if lines else None
    with suppress(PackageNotFoundError):
        triton = version("triton")
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_bytes": whole,
        "memory_free_bytes": free,
        "driver": driver,
        "cuda": torch.version.cuda,
        "triton": triton,
    }


def gpu_line(gpu: dict[str, Any]) -> str:
    whole, free = (gpu[name] / 2**30 for name in ("memory_bytes", "memory_free_bytes"))
    return (
        f"{gpu['name']}, {whole:.1f} GiB, {free:.1f} GiB free; capability {gpu['capability']}, "
        f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}, Triton {gpu['triton'] or 'none'}"
    )


def kernel_facts() -> dict[str, Any]:
    """Return which kernels run here, or why none do; build, test and time them if needed."""
    origin = problem = None
    try:
        load_library()
        origin = say_origin()
    except OSError as error:
        problem = str(error)
    sizes = [path.stat().st_size for path in cache_folder().glob("kernels-*") if path.is_file()]
    return {
        "compiler": find_compiler(),
        "origin": origin,
        "problem": problem,
        "tried": candidates_tried(),
        "cache": str(cache_folder()),
        "cached_builds": len(sizes),
        "cached_bytes": sum(sizes),
    }


def choices(device: torch.device, model: str) -> dict[str, Any]:
    """Return the backend and dtype that `auto` chooses, with reasons, and timings on the CPU."""
    config, timed = find_model(model).config, []
    name, fastest = (choose_dtype(kind, device, config) for kind in ("auto", "fastest"))
    if device.type == "cuda":
        early = "each starts before the last has ended" if starts_early(device) else "one by one"
        backend = "triton", f"our Triton kernels, in captured steps, {early}"
        if (problem := why_not_on(device)) is not None:
            backend = "cuda-graph", f"PyTorch's kernels in captured steps; triton: {problem}"
        why = "bfloat16 is not faster here"
        if name == "bfloat16":
            why = f"fast on {torch.cuda.get_device_name(device)}"
    else:
        timed = time_candidates(config)
        best = min((one for one in timed if one.dtype == name), key=lambda one: one.times.cost)
        backend = best.backend, "the fastest candidate in this type"
        why = "bfloat16 if at least a tenth faster than float32"
    return {
        "backend": {"name": backend[0], "why": backend[1]},
        "dtype": {"name": name, "why": why},
        "fastest": fastest,
        "candidates": [
            {"backend": one.backend, "dtype": one.dtype, **one.times._asdict()} for one in timed
        ],
    }


def probe_speed(
    device: torch.device, model: str, seconds: float, strategies: tuple[str, ...]
) -> dict[str, float]:
    """Return a world's frames per second, as in `diagd play`, detokenizing included."""
    found, prompt = find_model(model), WorldSource(model).folder / "prompt.mp4"
    speeds: dict[str, float] = {}
    if not found.config.num_action_tokens or not prompt.is_file():
        return speeds  # no prompt to continue
    world = VideoGenerator.from_pretrained(model, device, "fastest")
    assert world.vocabulary is not None
    start = read_video(prompt).frames[-1:]
    for strategy in strategies:
        frames = world.stream(start, itertools.repeat(world.vocabulary.names[1]), strategy=strategy)
        next(frames)  # warm-up
        started, count = time.monotonic(), 0
        while not count or time.monotonic() - started < seconds / len(strategies):
            next(frames)
            count += 1
        speeds[strategy] = count / (time.monotonic() - started)
    return speeds


def probe_memory(device: torch.device, model: str) -> dict[str, float]:
    """Return the milliseconds of a raster step, and its share of a plain copy's bandwidth."""
    config, dtype = find_model(model).config, choose_dtype("auto", device)
    grid = TokenGrid(1, config.grid_height, config.grid_width)
    given = draw_inputs(0, config, grid, device, 1)
    loaded = load_model(model, device=device, dtype=dtype_of(dtype))
    work = [Raster()], grid, [given], SamplingOptions(), PROBED_STEPS
    rows = engine_rows(loaded, dtype, "auto", *work)
    rows[0].runs = [rows[0].run() for _ in range(3)]
    ceilings = {dtype: measure_ceilings(device, dtype_of(dtype))}
    (row,) = report_rows(rows, config, grid, ceilings)
    return {"step_ms": row["step_ms"]["p50"], "bandwidth_share": row["bandwidth_share"]}


def main(options: DoctorOptions) -> dict[str, Any]:
    """Collect facts, print a line for each, then measure."""
    device, console, model = device_of(options.device), make_console(), options.model
    if options.again:
        time_again(find_model(model).config)
    with waiting("looking at this machine"):
        machine, kernels, chosen = machine_facts(), kernel_facts(), choices(device, model)
    report: dict[str, Any] = {
        "device": str(device),
        "machine": machine,
        "gpu": gpu_facts(device) if device.type == "cuda" else None,
        "kernels": kernels,
        "choices": chosen,
        "extras": {name: missing_modules(modules) for name, modules in EXTRAS.items()},
        "detectors": {name: one.path and str(one.path) for name, one in PUBLISHED.items()},
        "frames_per_second": {},
        "bandwidth": None,
        "warnings": _warnings(machine, kernels),
    }

    def say(name: str, text: str) -> None:
        console.print(f"{name:<11}{text}", soft_wrap=True)

    for name, text in _lines(report).items():
        say(name, text)
    if chosen["candidates"]:
        auto = chosen["backend"]["name"], chosen["dtype"]["name"]
        lines = []
        for one in chosen["candidates"]:
            pair = one["backend"], one["dtype"]
            note = "auto" if pair == auto else "--dtype int8" if one["dtype"] == "int8" else ""
            times = (f"{one[name]:.2f}" for name in ("raster_ms", "diagonal_ms"))
            lines.append([" ".join(pair), *times, note])
        title = f"ms per step (two layers of {model}, or of doom if it is large)"
        print_table(console, title, ["", "one lane", "a diagonal", ""], lines)
    for warning in report["warnings"]:
        say("warning", warning)
    if options.seconds:
        with waiting(f"generating for {options.seconds:g} seconds"):
            speeds = probe_speed(device, model, options.seconds, ("raster", "k=1"))
        report["frames_per_second"], fastest = speeds, chosen["fastest"]
        for strategy, speed in speeds.items():
            say(strategy, f"{speed:.2f} frames/s of {model} in {fastest}, as diagd play shows it")
        if speeds and device.type == "cuda":
            report["bandwidth"] = found = probe_memory(device, model)
            text = "{step_ms:.3f} ms a raster step, {bandwidth_share:.0%} of a copy's bandwidth"
            say("bandwidth", text.format(**found))
        if speeds:
            say("in short", _verdict(speeds["raster"], speeds["k=1"]))
    return report


def _warnings(machine: dict[str, Any], kernels: dict[str, Any]) -> list[str]:
    warnings = []
    if machine["used_by_others"] > BUSY_SHARE:
        warnings.append(
            f"other programs use {machine['used_by_others']:.0%} of the processor: "
            "speeds here are lower than on an idle machine; do not benchmark now"
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
    machine, kernels, chosen = report["machine"], report["kernels"], report["choices"]
    gigabytes = [machine[f"memory{part}_bytes"] / 2**30 for part in ("", "_available")]
    kept = f"{kernels['cached_builds']} kept, {kernels['cached_bytes'] / 2**20:.1f} MiB"
    there = [name for name, missing in report["extras"].items() if not missing]
    lacking = [f"{name} ({', '.join(m)})" for name, m in report["extras"].items() if m]
    return {
        "python": "{python}, diagd {diagd}, torch {torch}, {system}".format(**machine),
        "processor": f"{machine['processor']}: {', '.join(machine['instructions']) or 'no SIMD'}",
        "threads": f"{machine['threads']} for {machine['cores_allowed']:g} cores, "
        f"{machine['threads_from']}; others use {machine['used_by_others']:.0%}, "
        f"load {' '.join(map(str, machine['load_average']))}",
        "memory": f"{gigabytes[0]:.1f} GiB, {gigabytes[1]:.1f} GiB free",
        **({"gpu": gpu_line(report["gpu"])} if report["gpu"] else {}),
        "compiler": kernels["compiler"] or "none",
        "kernels": f"{kernels['origin'] or 'none'}; {kept} in {kernels['cache']}",
        "backend": "{name}: {why}".format(**chosen["backend"]),
        "dtype": "{name}: {why}".format(**chosen["dtype"]),
        "extras": ", ".join(there) or "none",
        "missing": ", ".join(lacking) or "nothing",
        "detectors": _detectors(report["detectors"]),
    }


def _detectors(paths: dict[str, str | None]) -> str:
    """Format the detectors whose weights are installed, and the commands to install the others."""
    there = ", ".join(name for name, path in paths.items() if path) or "none"
    commands = dict.fromkeys(PUBLISHED[name].command for name, path in paths.items() if not path)
    return f"{there}; install more with {', '.join(commands)}" if commands else there


def _verdict(raster: float, speed: float) -> str:
    """Rate frames per second, in raster order and along diagonals, for playing."""
    real_time = GenerationDefaults().fps
    slowdown, slower = real_time / speed, f"times slower than real time ({real_time:g}/s)"
    if slowdown <= 1:
        verdict = f"fast enough to play in real time ({real_time:g} frames/s)"
    elif slowdown <= 4:
        verdict = f"playable, {slowdown:.1f} {slower}"
    else:
        verdict = f"{slowdown:.0f} {slower}: good for videos"
    if speed > raster:
        return verdict
    return (
        f"{verdict}; k=1 is no faster than raster order ({speed / raster:.1f} times): this is a "
        "bug, please report it with the lines above"
    )
