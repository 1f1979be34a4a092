"""Say what this machine is, what of diagd will run on it and why, and how fast that is.

diagd doctor                   # some ten seconds, five of them a probe
diagd doctor --seconds 0       # no probe
"""

from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from diagd.backends.devices import device_of, dtype_of
from diagd.benchmark.machine import (
    BUSY_SHARE,
    WORLD,
    choices,
    extras_here,
    gpu_facts,
    kernel_facts,
    machine_facts,
    probe_speed,
)
from diagd.benchmark.options import DoctorOptions
from diagd.console import make_console, waiting
from diagd.families.defaults import GenerationDefaults

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
