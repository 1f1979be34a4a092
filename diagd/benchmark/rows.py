"""Tell a row that was disturbed: its measurements contradict each other.

Rows run in turns, so a machine that is slow throughout slows all of them alike. What that cannot
even out is another process that takes the machine for a moment. The bounds are far from what
undisturbed rows showed (docs/results/bench_cpu.jsonl), so that none of those is marked.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import DynamicCache

from diagd.backends.linears import int8_companion
from diagd.backends.native.model import NativeModel
from diagd.backends.prepare import Backend, prepare
from diagd.benchmark.steps import Ceilings, StepTimes, Stopwatch, bytes_read, flops, spread
from diagd.console import make_console, print_table, progress
from diagd.decoding.generate_tokens import DecodingEngine, synchronized_time
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.strategy import Conditions, Strategy
from diagd.models.config import ModelConfig
from diagd.models.huggingface import cache_argument, llama_of
from diagd.models.transformer import Transformer

MARK = "!"

# Repeats do the same work; undisturbed, the slowest took at most 1.26 times as long as the fastest.
# One that takes twice as long had half of the machine.
MAX_REPEATS_APART = 2.0

# Steps differ in lanes and in slots that they see, so the slowest take up to 3 times the median.
# From 10 times on, one step in a hundred adds a tenth to the time of all.
MAX_TAIL = 10.0

# The parts of a step are means over all repeats; the milliseconds of a step are the median
# repeat's. Undisturbed, the parts added up to at most 1.1 times those.
MAX_PARTS_OVER_STEP = 1.5


def is_disturbed(row: dict[str, Any]) -> bool:
    """Say whether a row of the report (see `report_rows`), of whatever age, contradicts itself."""
    steps, parts = row.get("step_ms"), row.get("parts_ms", {})
    whole = sum(parts.get(part, 0.0) for part in ("forward", "sampling", "bookkeeping"))
    return (
        row["seconds_max"] > MAX_REPEATS_APART * row["seconds_min"]
        or (steps is not None and steps["p99"] > MAX_TAIL * steps["p50"])
        or whole > MAX_PARTS_OVER_STEP * row["ms_per_step"]
    )


def disturbed_note(names: Sequence[str]) -> str:
    """Return the line under a table for the rows marked in it."""
    return f"{MARK} disturbed: {', '.join(names)} (times contradict each other): measure again"


SPEED = {  # header and form of each; shown where a row has any
    "steps": "{steps}",
    "ms/step": "{ms_per_step:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "frames/s": "{frames_per_second:.2f}",
    "over HF": "{over_hugging_face:.1f}x",
    "speedup": "{speedup:.1f}x",
    "fed/token": "{fed_per_token:.2f}",
    "= raster": "{tokens_equal_to_raster:.0%}",
    "efficiency": "{efficiency:.2f}",
    "first s": "{warm_up_seconds:.1f}",
}
LIMITS = {
    "p99": "{step_ms[p99]:.2f}",
    "MB/step": "{megabytes_per_step:.0f}",
    "of peak": "{bandwidth_share:.0%}",
    "MFLOP/step": "{megaflops_per_step:.0f}",
    "of peak ": "{flops_share:.0%}",
    "forward": "{parts_ms[forward]:.2f}",
    "linears": "{parts_ms[linears]:.2f}",
    "attention": "{parts_ms[attention]:.2f}",
    "sampling": "{parts_ms[sampling]:.2f}",
    "other": "{parts_ms[bookkeeping]:.2f}",
    "barriers": "{barriers_ms:.3f}",
}


def print_rows(document: dict[str, Any]) -> None:
    """Print speed and limits of every row; disturbed ones are marked."""
    options, console = document["options"], make_console()
    console.print(
        f"{options['model']}, {document['parameters'] / 1e6:.1f}M parameters, "
        f"{document['device']}, {document['threads']} threads, torch {document['torch']}; "
        f"medians of {options['repeats']}; after N: frames in the context"
    )
    for dtype, ceiling in document["ceilings"].items():
        rate, flops = ceiling["bytes_per_second"] / 1e9, ceiling["flops_per_second"] / 1e9
        console.print(
            f"{dtype}: this machine reads {rate:.0f} GB/s, multiplies {flops:.0f} GFLOP/s"
        )
    rows = document["rows"]
    kinds = {key: {row[key] for row in rows} - {""} for key in ("dtype", "backend")}
    common = " ".join(value for values in kinds.values() if len(values) == 1 for value in values)
    told_apart = [key for key, values in kinds.items() if len(values) > 1] + ["strategy"]
    names = [" ".join(filter(None, (row[key] for key in told_apart))) for row in rows]
    names = [name + after(row, rows) for name, row in zip(names, rows, strict=True)]
    for title, texts in (("speed", SPEED), ("limits; parts of a step in ms", LIMITS)):
        columns = {h: t for h, t in texts.items() if any(cell(t, row) != "-" for row in rows)}
        lines = [
            [name + f" {MARK}" * row["disturbed"], *(cell(t, row) for t in columns.values())]
            for name, row in zip(names, rows, strict=True)
            if texts is SPEED or "step_ms" in row
        ]
        header = ["", *(name.strip() for name in columns)]
        print_table(console, f"{title} {common and f'({common})'}", header, lines)
    disturbed = [name for name, row in zip(names, rows, strict=True) if row["disturbed"]]
    if disturbed:
        console.print(disturbed_note(disturbed))


def after(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Say what a row goes on from, where rows differ in that (older files do not)."""
    counts = {other.get("context_frames") for other in rows}
    return f" after {row['context_frames']}" if len(counts) > 1 else ""


def cell(text: str, row: dict[str, Any]) -> str:
    """Fill in a number, or a dash where this row has none."""
    try:
        return text.format(**row)
    except (KeyError, TypeError):
        return "-"


HUGGING_FACE = "hugging face"
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 2}


@dataclass(frozen=True)
class Inputs:
    """What every row starts from: prompt (1, P), actions (1, T, n), text (1, M, size) or None."""

    prompt: Tensor
    context_frames: int
    actions: Tensor
    text: Tensor | None = None


class Run(NamedTuple):
    """One run: seconds of decoding, tokens (1, T, H, W), steps, and tokens fed in them.

    Captures of CUDA graphs are apart, in seconds of their own.
    """

    seconds: float
    tokens: Tensor
    num_steps: int
    num_fed: int | None = None
    capture_seconds: float = 0.0


@dataclass
class Row:
    """One line of the table: how to run it, and what it took."""

    dtype: str
    backend: str
    name: str
    context_frames: int
    run: Callable[[], Run]
    stopwatch: Stopwatch | None = None
    weight_bytes: int = 0  # of each weight, as the backend keeps it
    barrier_seconds: float | None = None  # of a step, where threads of ours wait for each other
    first: Run | None = None  # to warm up
    seconds: list[float] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)


def engine_rows(
    model: Transformer,
    dtype: str,
    backend: Backend,
    strategies: Sequence[Strategy],
    grid: TokenGrid,
    inputs: Sequence[Inputs],
    sampling: SamplingOptions,
    sample: int | None = None,
) -> list[Row]:
    """Make a row for each strategy after each prompt; all share an engine with the whole context.

    Args:
        model: used up.
        inputs: prompts of different lengths, with one text.
        sample: time so many steps of a run and skip the others (see `Stopwatch`).

    Raises:
        ValueError: a strategy that this backend cannot run.
    """
    on_cpu, num_action_tokens = model.device.type == "cpu", model.config.num_action_tokens
    prepared, runner, backend = prepare(model, backend, dtype == "int8")
    for strategy in strategies:
        strategy.check(Conditions(sampling.temperature, grid, replays=runner != "eager"))
    stopwatch = Stopwatch(prepared, runner == "eager" and on_cpu, sample)
    engine = DecodingEngine(
        stopwatch if stopwatch.parts or sample else prepared,
        grid.height,
        grid.width,
        num_action_tokens=num_action_tokens,
        sampling=sampling,
        runner=runner,
        context=inputs[0].text,
        around_step=stopwatch.around_step,
    )
    if isinstance(prepared, NativeModel):
        costs = prepared.weight_bytes, prepared.barrier_seconds()
    else:
        costs = getattr(torch, dtype).itemsize, None
    rows = list[Row]()
    for given in inputs:
        for one in strategies:
            run = _engine_run(engine, one, grid, given, stopwatch)
            what = dtype, backend, one.name, given.context_frames
            rows.append(Row(*what, run, stopwatch, *costs))
    return rows


def hugging_face_rows(
    model: Transformer, dtype: str, grid: TokenGrid, inputs: Sequence[Inputs]
) -> list[Row]:
    """Make the rows of the baseline everybody has: the same weights in transformers."""
    run = partial(_run_hugging_face, llama_of(model), grid)
    return [
        Row(dtype, "", HUGGING_FACE, given.context_frames, partial(run, given)) for given in inputs
    ]


def _engine_run(
    engine: DecodingEngine,
    strategy: Strategy,
    grid: TokenGrid,
    inputs: Inputs,
    stopwatch: Stopwatch,
) -> Callable[[], Run]:
    def run() -> Run:
        with stopwatch.prefill():
            engine.prefill(inputs.prompt, inputs.context_frames)
        if strategy.has_schedule:
            stopwatch.begin(strategy.schedule(grid).num_steps)
        started = synchronized_time(inputs.prompt.device)
        frames = list(engine.decode(strategy, inputs.actions))
        seconds = synchronized_time(inputs.prompt.device) - started - engine.capture_seconds
        if stopwatch.sample_size:
            seconds = stopwatch.mean_seconds() * engine.num_steps
        counts = engine.num_steps, engine.num_fed
        return Run(seconds, torch.stack(frames, 1), *counts, engine.capture_seconds)

    return run


@torch.inference_mode()
def _run_hugging_face(llama: Any, grid: TokenGrid, inputs: Inputs) -> Run:
    """Greedy `generate`, a frame a call, the cache kept from frame to frame."""
    prompt, actions = inputs.prompt, inputs.actions
    cache = {cache_argument(llama): DynamicCache(config=llama.config)}
    llama(prompt[:, :-1], logits_to_keep=1, **cache)
    started, sequence = synchronized_time(prompt.device), prompt
    for t in range(grid.num_frames):
        sequence = torch.cat([sequence, actions[:, t]], dim=1)
        sequence = llama.generate(
            sequence,
            attention_mask=torch.ones_like(sequence),
            max_new_tokens=grid.tokens_per_frame,
            do_sample=False,
            eos_token_id=None,
            **cache,
        )
    seconds = synchronized_time(prompt.device) - started
    frames = sequence[:, prompt.shape[1] :].unflatten(1, (grid.num_frames, -1))
    visual = frames[:, :, actions.shape[2] :]
    return Run(seconds, visual.unflatten(2, (grid.height, grid.width)), grid.num_tokens)


def time_rows(rows: list[Row], repeats: int) -> None:
    """Run every row once to warm up, then all rows in turns, so that none has the better hour.

    What each takes at first is shown at once; the tables come at the end.
    """
    console = make_console()
    with progress("benchmark", len(rows) * (repeats + 1)) as job:
        for turn in range(repeats + 1):
            for row in rows:
                verb = "timing" if turn else "warming up"
                job.describe(f"{verb} {row.dtype} {row.backend} {row.name}")
                run = row.run()
                times = row.stopwatch.take() if row.stopwatch else StepTimes()
                if turn:
                    row.seconds.append(run.seconds)
                    row.steps.append(times)
                else:
                    row.first = run
                    pace = run.tokens.shape[1] / run.seconds
                    kind = " ".join(filter(None, (row.dtype, row.backend, row.name)))
                    after = f"after {row.context_frames}"
                    console.print(f"{kind} {after}: {pace:.3g} frames/s in its first run")
                job.advance()


def report_rows(
    rows: list[Row], config: ModelConfig, grid: TokenGrid, ceilings: dict[str, Ceilings]
) -> list[dict[str, Any]]:
    """Turn measurements into numbers.

    Speedups are against raster and generate of the same dtype after the same prompt.
    """
    report = []
    for row in rows:
        beside = [other for other in rows if other.context_frames == row.context_frames]
        rasters = [
            other
            for other in beside
            if other.name == "raster"
            and other.dtype == row.dtype
            and row.backend in ("", other.backend)
        ]
        raster = min(statistics.median(other.seconds) for other in rasters)
        baselines = {other.dtype: other.seconds for other in beside if other.name == HUGGING_FACE}
        baseline = baselines.get(row.dtype, baselines.get("float32"))  # it has no int8
        seconds, run, first = statistics.median(row.seconds), row.first, rasters[0].first
        assert run is not None
        assert first is not None
        step_ratio = grid.num_tokens / run.num_steps
        line: dict[str, Any] = {
            "dtype": row.dtype,
            "backend": row.backend,
            "strategy": row.name,
            "context_frames": row.context_frames,
            "steps": run.num_steps,
            "fed_per_token": None if run.num_fed is None else run.num_fed / grid.num_tokens,
            "seconds": seconds,
            "seconds_min": min(row.seconds),
            "seconds_max": max(row.seconds),
            "ms_per_step": seconds / run.num_steps * 1000,
            "tokens_per_second": grid.num_tokens / seconds,
            "frames_per_second": grid.num_frames / seconds,
            "over_hugging_face": statistics.median(baseline) / seconds if baseline else None,
            "speedup": raster / seconds,
            "step_ratio": step_ratio,
            "efficiency": raster / seconds / step_ratio,
            "warm_up_seconds": run.seconds,
            "capture_seconds": run.capture_seconds,
            "tokens_equal_to_raster": (run.tokens == first.tokens).float().mean().item(),
        }
        if row.stopwatch:
            line |= _limits(row, config, ceilings[row.dtype])
            line["attention"] = _attention(row, config, run.tokens.device)
        report.append(line | {"disturbed": is_disturbed(line)})
    return report


def _limits(row: Row, config: ModelConfig, ceilings: Ceilings) -> dict[str, Any]:
    """Say how close the steps came to the machine's ceilings, and where their time went."""
    sizes = row.weight_bytes, CACHE_BYTES[row.dtype]
    times = row.steps
    total = sum(sum(run.seconds) for run in times)
    count = sum(len(run.seconds) for run in times)
    read = sum(bytes_read(config, run, *sizes) for run in times)
    done = sum(flops(config, run) for run in times)
    parts = {part: sum(run.parts[part] for run in times) for part in times[0].parts}
    return {
        "step_ms": {
            name: value * 1000
            for name, value in spread([s for run in times for s in run.seconds]).items()
        },
        "megabytes_per_step": read / count / 1e6,
        "megaflops_per_step": done / count / 1e6,
        "bandwidth_share": read / total / ceilings.bytes_per_second,
        "flops_share": done / total / ceilings.flops_per_second,
        "parts_ms": {part: seconds / count * 1000 for part, seconds in parts.items()},
        "barriers_ms": None if row.barrier_seconds is None else row.barrier_seconds * 1000,
    }


def _attention(row: Row, config: ModelConfig, device: torch.device) -> str:
    """Name what attends in the widest step: our kernels, or the one that PyTorch chooses."""
    if row.backend == "native":
        return "native"
    if row.backend in ("triton", "compiled-graph"):
        return "triton"
    lanes, slots = max(pair for run in row.steps for pair in zip(run.lanes, run.slots, strict=True))
    lanes *= config.num_heads // config.num_kv_heads  # as `diagd.models.attention.attend` folds
    dtype = int8_companion(device) if row.dtype == "int8" else getattr(torch, row.dtype)
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    queries, keys = (
        torch.empty(1, config.num_kv_heads, count, config.head_dim, **make)
        for count in (lanes, slots)
    )
    mask = torch.ones(lanes, slots, dtype=torch.bool, device=device)
    choice: int = torch._fused_sdp_choice(queries, keys, keys, mask)  # pyright: ignore[reportPrivateImportUsage]
    return SDPBackend(choice).name.lower()
