"""Estimate frames a second on GPUs, most of them never tried with diagd: ranges, from counted work.

    python -m runs.gpu_estimates          # writes gpu_estimates.md and gpu_estimates.json

What a step reads and computes is counted as `diagd bench` counts it, from the model's shape and the
lanes of the plan; its launches are what a test bounds. What a GPU makes of that is assumed: a share
of the bandwidth and of the peak in its data sheet, whether it computes while it reads, a time for
each launch. A range covers all combinations of the two ends of every assumption. Checked against
CPUs, where all but the launches can be measured: `tests/runs/test_gpu_estimates.py`.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from diagd.benchmark.bench import CACHE_BYTES
from diagd.benchmark.steps import Ceilings, StepTimes, bytes_read, flops, slot_bytes
from diagd.decoding.schedule import SequenceLayout, TokenGrid, make_plan
from diagd.decoding.strategies.table import Diagonal, Raster, Strategy
from diagd.families.presets import PRESETS
from diagd.files import write_json, write_text
from diagd.models.config import ModelConfig
from diagd.models.transformer import num_parameters
from runs.gpu_report import ROOT, VIDEOS, table, wrapped

# NVIDIA's data sheets: memory bandwidth, bfloat16 without sparsity; SXM modules, the A100 of 80 GB
GPUS = {
    "A100": Ceilings(2.039e12, 312e12),
    "H100": Ceilings(3.35e12, 989e12),
    "H200": Ceilings(4.8e12, 989e12),
    "RTX 4090": Ceilings(1.008e12, 165e12),
}
# of a captured step by our kernels; tests/backends/triton/test_compiled.py bounds them
MOST_LAUNCHES = {"mc-ar-300m": 104, "mc-ar-doom": 34, "wham-1.6b": 124, "cosmos-4b": 84}
MEMORY = (  # of what the page counts the bytes
    *("mc-ar-doom", "mc-ar-300m", "mc-ar-1.2b", "wham-1.6b", "cosmos-4b", "cosmos-12b"),
    *("janus-pro-1b", "janus-pro-7b", "chameleon-7b", "emu3", "glm-image-9b", "emu3.5"),
)

MOST_SLOTS = 16384


class Assumption(NamedTuple):
    """How a machine does its work.

    Attributes:
        bandwidth_share, flops_share: of its ceilings.
        at_once: it computes while it reads.
        launch_seconds: what each kernel in a graph costs beside its reading and computing.
    """

    bandwidth_share: float
    flops_share: float
    at_once: bool
    launch_seconds: float


BEST, WORST = Assumption(0.9, 0.7, True, 1e-6), Assumption(0.6, 0.3, False, 3e-6)
ASSUMPTIONS = [Assumption(*ends) for ends in itertools.product(*zip(BEST, WORST, strict=True))]


class Work(NamedTuple):
    """What one step reads of weights and cache, and its multiplications and additions."""

    num_bytes: float
    flops: float


class Range(NamedTuple):
    """The lowest and the highest of some values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Range":
        """Return the range that covers them."""
        ordered = sorted(values)
        return cls(ordered[0], ordered[-1])

    def __str__(self) -> str:
        """Say it with two digits, which is more than an estimate has."""
        return " to ".join(f"{float(f'{value:.2g}'):g}" for value in self)


@dataclass(frozen=True)
class Options:
    """Estimate every model on every GPU."""

    out: Path = ROOT / "docs/results"  # folder for gpu_estimates.md and gpu_estimates.json


def main(options: Options) -> None:
    """Write both files."""
    rows = [row for model in MOST_LAUNCHES for row in estimate(model)]
    document = {
        "title": "estimates: nothing here is measured",
        "assumptions": {"best": BEST._asdict(), "worst": WORST._asdict()},
        "data_sheets": {name: asdict(ceilings) for name, ceilings in GPUS.items()},
        "estimates": rows,
    }
    write_json(options.out / "gpu_estimates.json", document, indent=1)
    write_text(options.out / "gpu_estimates.md", "\n".join(page(rows)) + "\n")


def strategies_of(model: str) -> list[Strategy]:
    """Return raster, k=1, and, for a model whose frames no action parts, overlapping frames."""
    config = PRESETS[model]
    overlap = [] if config.num_action_tokens else [Diagonal(1, config.grid_height)]
    return [Raster(), Diagonal(1), *overlap]


def work(
    config: ModelConfig,
    strategy: Strategy,
    num_frames: int,
    context_frames: int,
    dtype: str = "bfloat16",
    pad: bool = True,
) -> list[Work]:
    """Count the work of every step.

    Args:
        pad: steps have few widths, as in CUDA graphs.
    """
    grid = TokenGrid(num_frames, config.grid_height, config.grid_width)
    layout = SequenceLayout(grid, config.num_action_tokens, context_frames)
    plan = make_plan(strategy.schedule(grid), layout, pad)
    used, number_bytes = config.prefix_length + layout.context_slots, CACHE_BYTES[dtype]
    steps = list[Work]()
    for start, stop, end in zip(plan.starts, plan.starts[1:], plan.ends, strict=False):
        step = StepTimes(lanes=[stop - start], slots=[used + end])
        num_bytes = bytes_read(config, step, number_bytes, number_bytes)
        steps.append(Work(num_bytes, flops(config, step)))
    return steps


def seconds(
    steps: list[Work], machine: Ceilings, assumption: Assumption, launches: int = 0
) -> float:
    """Return what the steps take under an assumption."""
    bandwidth = machine.bytes_per_second * assumption.bandwidth_share
    rate = machine.flops_per_second * assumption.flops_share
    together = max if assumption.at_once else lambda reading, computing: reading + computing
    total = sum(together(step.num_bytes / bandwidth, step.flops / rate) for step in steps)
    return total + len(steps) * launches * assumption.launch_seconds


def over_raster(raster: list[float], own: list[float]) -> Range:
    """Return how many times faster than raster a strategy is, of the seconds under each assumption.

    At best, what holds for raster holds for it as well. At worst, raster has the best of all, and
    the steps of many lanes the worst.
    """
    return Range(min(raster) / max(own), max(a / b for a, b in zip(raster, own, strict=True)))


def estimate(model: str) -> list[dict[str, Any]]:
    """Estimate the strategies of a model on every GPU."""
    config, launches = PRESETS[model], MOST_LAUNCHES[model]
    frames, context_frames = VIDEOS.get(model, (2, 1))
    rows = []
    todo = {one.name: work(config, one, frames, context_frames) for one in strategies_of(model)}
    for gpu, machine in GPUS.items():
        took = {
            name: [seconds(steps, machine, one, launches) for one in ASSUMPTIONS]
            for name, steps in todo.items()
        }
        for name, steps in todo.items():
            rows.append(
                {
                    **{"model": model, "gpu": gpu, "strategy": name, "steps": len(steps)},
                    "megabytes_per_step": sum(step.num_bytes for step in steps) / len(steps) / 1e6,
                    "megaflops_per_step": sum(step.flops for step in steps) / len(steps) / 1e6,
                    "launches_per_step": launches,
                    "ms_per_step_estimate": Range.of(s / len(steps) * 1e3 for s in took[name]),
                    "frames_per_second_estimate": Range.of(frames / s for s in took[name]),
                    "over_raster_estimate": over_raster(took["raster"], took[name]),
                }
            )
    return rows


def page(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the page."""
    lines = ["# Estimates for GPUs, nothing here is measured", ""]
    lines += wrapped(
        "Made by `runs/gpu_estimates.py`: frames a second of captured steps by our Triton kernels. "
        "Weights and cache in bfloat16, one video at a time. Pixels and prompts are left out."
    )
    lines += ["", *table_of(rows, "frames_per_second_estimate", "frames/s, estimate")]
    diagonal = [row for row in rows if row["strategy"] != "raster"]
    lines += ["", *table_of(diagonal, "over_raster_estimate", "over raster, estimate")]
    lines += ["", "## What goes in", "", "Counted from shapes and plans, means over the steps:", ""]
    lines += work_table(rows)
    lines += ["", "From data sheets:", ""]
    sheets = [
        [name, f"{gpu.bytes_per_second / 1e9:.0f}", f"{gpu.flops_per_second / 1e12:.0f}"]
        for name, gpu in GPUS.items()
    ]
    lines += table(["GPU", "memory, GB/s", "dense bfloat16, TFLOP/s"], sheets)
    lines += ["", *memory_lines()]
    lines += ["", "Assumed; a range covers all combinations:", ""]
    texts = {
        "share of the memory's bandwidth reached": "bandwidth_share",
        "share of the peak of products reached": "flops_share",
        "computes while it reads": "at_once",
        "seconds a launch costs in a graph": "launch_seconds",
    }
    ends = [[text, getattr(BEST, name), getattr(WORST, name)] for text, name in texts.items()]
    return [*lines, *table(["assumption", "best", "worst"], ends)]


def memory_lines() -> list[str]:
    """Return the table of bytes on a card, counted from shapes."""
    rows = []
    for model in MEMORY:
        config = PRESETS[model]
        slots = min(config.max_positions, MOST_SLOTS)
        weights, cache = num_parameters(config), slot_bytes(config, 2) * slots
        gigabytes = [size / 2**30 for size in (2 * weights, weights, cache)]
        rows.append([model, *(f"{size:.2f}" for size in gigabytes), slots])
    header = ["model", "bfloat16, GiB", "int8, GiB", "cache, GiB", "slots"]
    text = (
        "Memory, counted: weights, and the cache of one sequence of so many slots, its full "
        f"context up to {MOST_SLOTS}. Each further sequence needs a cache, a guided one two. In "
        "int8, tables of embeddings stay in bfloat16, which is left out. Beside them, torch and "
        "graphs take some hundreds of MiB."
    )
    return [*wrapped(text), "", *table(header, rows)]


def table_of(rows: list[dict[str, Any]], name: str, title: str) -> list[str]:
    """Return one of the ranges as a table: a line for each strategy, a column for each GPU."""
    lines: dict[str, list[Any]] = {}
    for row in rows:
        line = f"{row['model']} {row['strategy']}"
        lines.setdefault(line, [line]).append(row[name])
    return table([title, *(f"{gpu} (estimate)" for gpu in GPUS)], list(lines.values()))


def work_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of what is counted, which is the same on every GPU."""
    header = ["model", "strategy", "steps", "MB read", "GFLOP", "launches, at most"]
    lines = [
        [
            *(row["model"], row["strategy"], row["steps"], f"{row['megabytes_per_step']:.0f}"),
            *(f"{row['megaflops_per_step'] / 1e3:.0f}", row["launches_per_step"]),
        ]
        for row in rows
        if row["gpu"] == next(iter(GPUS))
    ]
    return table(header, lines)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
