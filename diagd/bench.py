"""Time decoding schedules side by side on the same weights: raster, diagonals, Hugging Face.

Efficiency is the speedup over raster divided by the cut in steps: 1 means that a step of many lanes
costs what a step of one lane costs, so the whole cut in steps became wall-clock. All rows run in
turns, so a machine that slows down slows all of them; warm-up (with compilation) is timed apart.

    diagd bench --model mc-ar-42m --grid 2x14x24 --row-lag 1 2 4 --baseline hf
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.generate import peak_memory_bytes
from diagd.decoding.runner import RunnerName
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.flags import DTypeName, device_of, dtype_of
from diagd.models.checkpoints import load_model
from diagd.models.config import PRESETS
from diagd.models.llama import llama_of
from diagd.models.packed import pack_linears
from diagd.models.transformer import Transformer


@dataclass(frozen=True)
class BenchOptions:
    """Run raster and diagonal decoding (greedy, after one context frame) and compare."""

    model: str = (
        "doom"  # a preset with random weights (mc-ar-42m, cosmos-4b ...), doom, or a folder
    )
    grid: str | None = None  # frames x rows x columns to generate; default 2 frames of the model's
    row_lag: tuple[int, ...] = (1, 2, 4)  # diagonals to time, spatial only
    dtype: DTypeName = "float32"
    device: str = "cpu"
    compile: bool = False  # torch.compile the step
    cuda_graph: bool = False  # replay each step from a CUDA graph
    pack: bool = True  # pre-pack the linear layers (CPU, without --compile)
    baseline: Literal["hf", "none"] = "hf"  # Hugging Face generate on the same weights
    repeats: int = 3  # timed runs of every row
    seed: int = 0  # of random weights, prompt and actions

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.compile and self.cuda_graph:
            raise ValueError("compile and cuda_graph exclude each other")


@dataclass
class Row:
    """One line of the table: how to run it, and what it took."""

    name: str
    num_steps: int
    run: Callable[[], tuple[float, Tensor]]  # -> seconds of decoding, tokens (1, T, H, W)
    warm_up_seconds: float = 0.0
    seconds: list[float] | None = None
    tokens: Tensor | None = None


def main(options: BenchOptions) -> dict[str, Any]:
    """Time every row and print the table."""
    device = device_of(options.device)
    model = _model(options, device)
    config = model.config
    grid = TokenGrid.parse(options.grid or f"2x{config.grid_height}x{config.grid_width}")
    schedules = [DiagonalSchedule.raster(grid)]
    schedules += [DiagonalSchedule.spatial(grid, lag) for lag in options.row_lag]
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(config.image_vocab_size, (1, grid.tokens_per_frame), generator=generator)
    action_range = min(config.image_vocab_size, config.vocab_size - 1), config.vocab_size
    actions = torch.randint(
        *action_range, (1, grid.num_frames, config.num_action_tokens), generator=generator
    )
    inputs = prompt.to(device), actions.to(device)
    rows = []
    if options.baseline == "hf":
        llama = llama_of(model)
        rows.append(
            Row("hugging face", grid.num_tokens, lambda: _run_hugging_face(llama, grid, *inputs))
        )
    if options.pack and not options.compile and device.type == "cpu":
        pack_linears(model)
    runner: RunnerName = "compile" if options.compile else "eager"
    runner = "cuda-graph" if options.cuda_graph else runner
    engine = DiagonalEngine(
        model, grid.height, grid.width, num_action_tokens=config.num_action_tokens, runner=runner
    )
    for schedule in schedules:
        name = "raster" if schedule is schedules[0] else f"row_lag {schedule.row_lag}"
        rows.append(Row(name, schedule.num_steps, _engine_run(engine, schedule, *inputs)))
    _time(rows, options.repeats)
    report = _report(rows, grid)
    _print(report, options, model, device)
    return {
        "options": asdict(options),
        "grid": [grid.num_frames, grid.height, grid.width],
        "parameters": num_parameters(model),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "peak_memory_bytes": peak_memory_bytes(device),
        "rows": report,
    }


def num_parameters(model: Transformer) -> int:
    """Count weights from the config, however they are stored."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(model.config).parameters())


def _model(options: BenchOptions, device: torch.device) -> Transformer:
    dtype = dtype_of(options.dtype)
    if options.model in PRESETS:
        return Transformer.random(PRESETS[options.model], options.seed, device, dtype)
    return load_model(options.model, device=device, dtype=dtype)


def _engine_run(
    engine: DiagonalEngine, schedule: DiagonalSchedule, prompt: Tensor, actions: Tensor
) -> Callable[[], tuple[float, Tensor]]:
    def run() -> tuple[float, Tensor]:
        engine.prefill(prompt)
        started = _now(prompt.device)
        frames = list(engine.decode(schedule, actions))
        return _now(prompt.device) - started, torch.stack(frames, 1)

    return run


@torch.inference_mode()
def _run_hugging_face(
    llama: Any, grid: TokenGrid, prompt: Tensor, actions: Tensor
) -> tuple[float, Tensor]:
    """Greedy `generate`, a frame a call, the cache kept from frame to frame."""
    from transformers import DynamicCache

    cache = DynamicCache(config=llama.config)
    llama(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
    started, sequence = _now(prompt.device), prompt
    for t in range(grid.num_frames):
        sequence = llama.generate(
            torch.cat([sequence, actions[:, t]], dim=1),
            past_key_values=cache,
            max_new_tokens=grid.tokens_per_frame,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    seconds = _now(prompt.device) - started
    frames = sequence[:, prompt.shape[1] :].unflatten(1, (grid.num_frames, -1))
    visual = frames[:, :, actions.shape[2] :]
    return seconds, visual.unflatten(2, (grid.height, grid.width))


def _time(rows: list[Row], repeats: int) -> None:
    with Progress(transient=True) as progress:
        task = progress.add_task("benchmark", total=len(rows) * (repeats + 1))
        for row in rows:
            progress.update(task, description=f"warming up {row.name}")
            row.warm_up_seconds, row.tokens = row.run()
            row.seconds = []
            progress.advance(task)
        for _ in range(repeats):
            for row in rows:
                progress.update(task, description=f"timing {row.name}")
                assert row.seconds is not None
                row.seconds.append(row.run()[0])
                progress.advance(task)


def _report(rows: list[Row], grid: TokenGrid) -> list[dict[str, Any]]:
    raster = next(row for row in rows if row.name == "raster")
    assert raster.seconds
    assert raster.tokens is not None
    baseline = statistics.median(raster.seconds)
    report = []
    for row in rows:
        assert row.seconds
        assert row.tokens is not None
        seconds = statistics.median(row.seconds)
        step_ratio = raster.num_steps / row.num_steps
        report.append(
            {
                "schedule": row.name,
                "steps": row.num_steps,
                "seconds": seconds,
                "seconds_min": min(row.seconds),
                "seconds_max": max(row.seconds),
                "ms_per_step": seconds / row.num_steps * 1000,
                "tokens_per_second": grid.num_tokens / seconds,
                "frames_per_second": grid.num_frames / seconds,
                "speedup": baseline / seconds,
                "step_ratio": step_ratio,
                "efficiency": baseline / seconds / step_ratio,
                "warm_up_seconds": row.warm_up_seconds,
                "tokens_equal_to_raster": (row.tokens == raster.tokens).float().mean().item(),
            }
        )
    return report


def _print(
    report: list[dict[str, Any]], options: BenchOptions, model: Transformer, device: torch.device
) -> None:
    title = (
        f"{options.model}, {num_parameters(model) / 1e6:.1f}M parameters, {options.dtype}, "
        f"{device}, {torch.get_num_threads()} threads; medians of {options.repeats} [min-max]"
    )
    table = Table(title=title)
    for column in ("", "steps", "s", "ms/step", "tokens/s", "frames/s", "speedup", "step ratio"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_column("efficiency", justify="right")
    table.add_column("warm-up s", justify="right")
    for row in report:
        spread = f"{row['seconds']:.2f} [{row['seconds_min']:.2f}-{row['seconds_max']:.2f}]"
        table.add_row(
            row["schedule"],
            str(row["steps"]),
            spread,
            f"{row['ms_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['frames_per_second']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['step_ratio']:.2f}x",
            f"{row['efficiency']:.2f}",
            f"{row['warm_up_seconds']:.1f}",
        )
    Console().print(table)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
