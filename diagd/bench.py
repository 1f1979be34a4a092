"""Time decoding schedules side by side on the same weights: raster, diagonals, Hugging Face.

Speedup is over raster: the faster of its runs with plain and with packed weights. Efficiency is the
speedup divided by the cut in steps: 1 means that a step of many lanes costs what a step of one lane
costs, so the whole cut in steps became wall-clock. All rows run in
turns, so a machine that slows down slows all of them; warm-up (with compilation) is timed apart.

    diagd bench --model mc-ar-42m --grid 2x14x24 --row-lag 1 2 4 --baseline hf
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.generate import peak_memory_bytes, synchronized_time
from diagd.decoding.runner import RunnerName
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.flags import DTypeName, device_of, dtype_of
from diagd.models.checkpoints import load_model
from diagd.models.config import PRESETS
from diagd.models.llama import llama_of
from diagd.models.inference import optimize_for_inference
from diagd.models.transformer import Transformer

COLUMNS = {
    "steps": "{steps}",
    "s": "{seconds:.2f} [{seconds_min:.2f}-{seconds_max:.2f}]",
    "ms/step": "{ms_per_step:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "frames/s": "{frames_per_second:.2f}",
    "speedup": "{speedup:.2f}x",
    "step ratio": "{step_ratio:.2f}x",
    "efficiency": "{efficiency:.2f}",
    "warm-up s": "{warm_up_seconds:.1f}",
}


@dataclass(frozen=True)
class BenchOptions:
    """Run raster and diagonal decoding (greedy, after one context frame) and compare."""

    model: str = "doom"  # a preset with random weights (mc-ar-42m, wham-1.6b), doom, or a folder
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
    if (length := prompt.numel() + grid.num_tokens + actions.numel()) > config.max_positions:
        raise ValueError(f"prompt and grid take {length} of {config.max_positions} positions")
    inputs = prompt.to(device), actions.to(device)
    rows = []
    if options.baseline == "hf":
        llama = llama_of(model)
        rows.append(
            Row("hugging face", grid.num_tokens, lambda: _run_hugging_face(llama, grid, *inputs))
        )
    engine = plain = _engine(model, grid, options)
    rows.append(Row("raster", grid.num_tokens, _engine_run(plain, schedules[0], *inputs)))
    if options.pack and not options.compile and device.type == "cpu":
        engine = _engine(pack_linears(copy.deepcopy(model)), grid, options)
        run = _engine_run(engine, schedules[0], *inputs)
        rows.append(Row("raster, packed", grid.num_tokens, run))
    for schedule in schedules[1:]:
        run = _engine_run(engine, schedule, *inputs)
        rows.append(Row(f"row_lag {schedule.row_lag}", schedule.num_steps, run))
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


def _engine(model: Transformer, grid: TokenGrid, options: BenchOptions) -> DiagonalEngine:
    """Allocate the model's whole context."""
    runner: RunnerName = "compile" if options.compile else "eager"
    return DiagonalEngine(
        model,
        grid.height,
        grid.width,
        num_action_tokens=model.config.num_action_tokens,
        runner="cuda-graph" if options.cuda_graph else runner,
    )


def _engine_run(
    engine: DiagonalEngine, schedule: DiagonalSchedule, prompt: Tensor, actions: Tensor
) -> Callable[[], tuple[float, Tensor]]:
    def run() -> tuple[float, Tensor]:
        engine.prefill(prompt)
        started = synchronized_time(prompt.device)
        frames = list(engine.decode(schedule, actions))
        return synchronized_time(prompt.device) - started, torch.stack(frames, 1)

    return run


@torch.inference_mode()
def _run_hugging_face(
    llama: Any, grid: TokenGrid, prompt: Tensor, actions: Tensor
) -> tuple[float, Tensor]:
    """Greedy `generate`, a frame a call, the cache kept from frame to frame."""
    cache = DynamicCache(config=llama.config)
    llama(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
    started, sequence = synchronized_time(prompt.device), prompt
    for t in range(grid.num_frames):
        sequence = torch.cat([sequence, actions[:, t]], dim=1)
        sequence = llama.generate(
            sequence,
            attention_mask=torch.ones_like(sequence),
            past_key_values=cache,
            max_new_tokens=grid.tokens_per_frame,
            do_sample=False,
            eos_token_id=None,
        )
    seconds = synchronized_time(prompt.device) - started
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
    assert raster.tokens is not None
    baseline = min(statistics.median(row.seconds or []) for row in rows if "raster" in row.name)
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
    for header in ("", *COLUMNS):
        table.add_column(header, justify="right" if header else "left")
    for row in report:
        table.add_row(row["schedule"], *(text.format(**row) for text in COLUMNS.values()))
    Console().print(table)
