"""Time strategies side by side on the same weights: raster, diagonals, exact, Hugging Face.

Speedup is over raster of the same dtype and backend. Efficiency is speedup divided by the reduction
in steps: 1 means that a step of many lanes costs no more than a step of one lane. The first run of
each row (with compilation) is timed separately.

    diagd bench --model mc-ar-42m --grid 2x14x24 -k 1 2 4 --dtype int8
    diagd bench --quick
    diagd bench --strategy exact zipar=4 --temperature 1
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from diagd.backends.devices import DTypeName, device_of, dtype_of
from diagd.backends.linears import int8_companion
from diagd.backends.native.model import NativeModel
from diagd.backends.prepare import Backend, choose_dtype, prepare
from diagd.benchmark import steps
from diagd.benchmark.options import BenchOptions
from diagd.console import cell, make_console, print_records, progress
from diagd.decoding.generate_tokens import DecodingEngine, peak_memory_bytes, synchronized_time
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Strategy
from diagd.families.checkpoints import find_model, load_model
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer, num_parameters
from diagd.system import provenance
from diagd.tokenizers.text import NUM_PLACES

HUGGING_FACE = "hugging face"
HUGGING_FACE_MODELS = "diagd.models.huggingface"  # slow to import
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 2}


@dataclass(frozen=True)
class Inputs:
    prompt: Tensor  # (1, P)
    context_frames: int
    actions: Tensor  # (1, T, n)
    text: Tensor | None = None  # (1, M, size)


class Run(NamedTuple):
    seconds: float  # decoding time, without CUDA graph capture
    tokens: Tensor  # (1, T, H, W)
    num_steps: int
    num_fed: int | None = None  # tokens fed in these steps
    capture_seconds: float = 0.0
    times: steps.StepTimes | None = None  # None for Hugging Face and webgpu


@dataclass
class Row:
    dtype: str
    backend: str
    strategy: str
    context_frames: int
    run: Callable[[], Run]
    weight_bytes: int = 0  # bytes a weight, as the backend stores it
    runs: list[Run] = field(default_factory=list)  # the first run warms up

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs[1:])


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
    """Make a row for each strategy and prompt (all with one text); consumes the model.

    The rows share one engine of full context length. For `sample` see `Stopwatch`.
    """
    config, device = model.config, model.device
    prepared, backend = prepare(model, backend, dtype == "int8")
    knows_steps = backend != "webgpu"  # webgpu runs a frame's steps together
    has_parts = knows_steps and device.type == "cpu" and not prepared.replays
    stopwatch = steps.Stopwatch(prepared, has_parts, sample)
    engine = DecodingEngine(stopwatch, config.frame, sampling=sampling, context=inputs[0].text)

    def run(strategy: Strategy, given: Inputs) -> Run:
        engine.prefill(given.prompt, given.context_frames)
        if strategy.has_schedule:
            stopwatch.begin(strategy.schedule(grid).num_steps)
        started = synchronized_time(device)
        frames = list(engine.decode(strategy, given.actions))
        seconds = synchronized_time(device) - started - engine.capture_seconds
        times = stopwatch.collect() if knows_steps else None
        if sample and times:
            seconds = statistics.mean(times.seconds) * engine.stream.num_steps
        counts = engine.stream.num_steps, engine.stream.num_fed
        return Run(seconds, torch.stack(frames, 1), *counts, engine.capture_seconds, times)

    own = isinstance(prepared, NativeModel)
    weight_bytes = prepared.weight_bytes if own else getattr(torch, dtype).itemsize
    return [
        Row(dtype, backend, one.name, given.context_frames, partial(run, one, given), weight_bytes)
        for given in inputs
        for one in strategies
    ]


def hugging_face(model: Transformer, grid: TokenGrid) -> Callable[[Inputs], Run]:
    """Make the Hugging Face baseline: greedy `generate`, one call per frame, cache kept."""
    transformers, ours = (import_module(name) for name in ("transformers", HUGGING_FACE_MODELS))
    llama = ours.llama_of(model)

    @torch.inference_mode()
    def run(inputs: Inputs) -> Run:
        prompt, actions = inputs.prompt, inputs.actions
        cache = {ours.cache_argument(llama): transformers.DynamicCache(config=llama.config)}
        if prompt.shape[1] > 1:
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

    return run


def time_rows(rows: list[Row], repeats: int) -> None:
    """Warm up every row and print its speed, then time the rows in turns.

    Taking turns spreads a slow spell of the machine over all rows.
    """
    console = make_console()
    with progress("benchmark", len(rows) * (repeats + 1)) as job:
        for turn in range(repeats + 1):
            for row in rows:
                name = " ".join(filter(None, (row.dtype, row.backend, row.strategy)))
                job.describe(f"{'timing' if turn else 'warming up'} {name}")
                run = row.run()
                if not turn:
                    if run.capture_seconds:  # steps that follow each other again are one graph
                        seconds = run.capture_seconds + row.run().capture_seconds
                        run = run._replace(capture_seconds=seconds)
                    pace = f"{run.tokens.shape[1] / run.seconds:.3g} frames/s"
                    console.print(f"{name} after {row.context_frames}: {pace} in its first run")
                row.runs.append(run)
                job.advance()


def report_rows(
    rows: list[Row], config: ModelConfig, grid: TokenGrid, ceilings: dict[str, steps.Ceilings]
) -> list[dict[str, Any]]:
    """Return each row's numbers; speedups are over the same dtype after the same prompt."""
    report = []
    for row in rows:
        beside = [other for other in rows if other.context_frames == row.context_frames]
        rasters = [
            other
            for other in beside
            if (other.strategy, other.dtype) == ("raster", row.dtype)
            and row.backend in ("", other.backend)
        ]
        raster = min(rasters, key=lambda other: other.seconds)
        baselines = {one.dtype: one.seconds for one in beside if one.strategy == HUGGING_FACE}
        baseline = baselines.get(row.dtype, baselines.get("float32"))  # Hugging Face has no int8
        (first, *timed), seconds = row.runs, row.seconds
        speedup, step_ratio = raster.seconds / seconds, grid.num_tokens / first.num_steps
        line: dict[str, Any] = {
            "dtype": row.dtype,
            "backend": row.backend,
            "strategy": row.strategy,
            "context_frames": row.context_frames,
            "steps": first.num_steps,
            "fed_per_token": None if first.num_fed is None else first.num_fed / grid.num_tokens,
            "seconds": seconds,
            "seconds_min": min(run.seconds for run in timed),
            "seconds_max": max(run.seconds for run in timed),
            "ms_per_step": seconds / first.num_steps * 1000,
            "tokens_per_second": grid.num_tokens / seconds,
            "frames_per_second": grid.num_frames / seconds,
            "over_hugging_face": baseline / seconds if baseline else None,
            "speedup": speedup,
            "step_ratio": step_ratio,
            "efficiency": speedup / step_ratio,
            "warm_up_seconds": first.seconds,
            "capture_seconds": first.capture_seconds,
            "tokens_equal_to_raster": (first.tokens == raster.runs[0].tokens).float().mean().item(),
        }
        if times := [run.times for run in timed if run.times]:
            device = first.tokens.device
            line |= _limits(row, times, config, ceilings[row.dtype], device)
            line["attention"] = _attention(row, times, config, device)
        report.append(line | {"disturbed": is_disturbed(line)})
    return report


def _limits(
    row: Row,
    times: list[steps.StepTimes],
    config: ModelConfig,
    ceilings: steps.Ceilings,
    device: torch.device,
) -> dict[str, Any]:
    """Compare the steps with the machine's ceilings, and split their time into parts."""
    cache_bytes = CACHE_BYTES[row.dtype]
    seconds = sorted(second for one in times for second in one.seconds)
    count, total = len(seconds), sum(seconds)
    read = sum(steps.bytes_read(config, one, row.weight_bytes, cache_bytes) for one in times)
    done = sum(steps.flops(config, one) for one in times)
    # weights that stay in the processor's caches are read faster than memory
    rate = max(ceilings.bytes_per_second, steps.read_rate(device, round(read / count)))
    return {
        "step_ms": {
            "p50": statistics.median(seconds) * 1000,
            "p99": seconds[min(count - 1, int(count * 0.99))] * 1000,
            "min": seconds[0] * 1000,
            "max": seconds[-1] * 1000,
        },
        "megabytes_per_step": read / count / 1e6,
        "megaflops_per_step": done / count / 1e6,
        "bandwidth_share": read / total / rate,
        "flops_share": done / total / ceilings.flops_per_second,
        "parts_ms": {
            part: sum(one.parts[part] for one in times) / count * 1000 for part in times[0].parts
        },
    }


def _attention(
    row: Row, times: list[steps.StepTimes], config: ModelConfig, device: torch.device
) -> str:
    """Name the attention kernel of the widest step: ours, or PyTorch's choice."""
    if row.backend == "native":
        return "native"
    if row.backend == "triton":
        return "triton"
    lanes, slots = max(pair for one in times for pair in zip(one.lanes, one.slots, strict=True))
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


# Both bounds are well above undisturbed rows (docs/results/bench_cpu.jsonl).
# Repeats do the same work; undisturbed, the slowest took at most 1.26 times the fastest.
# A repeat that takes twice as long had half of the machine.
MAX_REPEATS_APART = 2.0
# Steps differ in lanes and visible slots, so the slowest take up to 3 times the median.
# At 10 times, one step in a hundred adds a tenth to the total.
MAX_TAIL = 10.0
# The parts of a step are means over all repeats; its milliseconds are the median repeat's.
# Undisturbed, the parts added up to at most 1.1 times the step.
MAX_PARTS_OVER_STEP = 1.5
MARK = "!"


def is_disturbed(row: dict[str, Any]) -> bool:
    """Return whether a row of the report contradicts itself."""
    step, parts = row.get("step_ms"), row.get("parts_ms", {})
    whole = sum(parts.get(part, 0.0) for part in ("forward", "sampling", "bookkeeping"))
    return (
        row["seconds_max"] > MAX_REPEATS_APART * row["seconds_min"]
        or (step is not None and step["p99"] > MAX_TAIL * step["p50"])
        or whole > MAX_PARTS_OVER_STEP * row["ms_per_step"]
    )


def disturbed_note(names: Sequence[str]) -> str:
    """Format the note below a table that has marked rows."""
    return f"{MARK} disturbed: {', '.join(names)} (times contradict each other): measure again"


SPEED = {  # heading and format of each column; shown where a row has any
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
}


def print_rows(document: dict[str, Any]) -> None:
    """Print speed and limits of every row; disturbed ones are marked."""
    options, rows, console = document["options"], document["rows"], make_console()
    console.print(
        f"{options['model']}, {document['parameters'] / 1e6:.1f}M parameters, "
        f"{document['device']}, {document['threads']} threads, torch {document['torch']}; "
        f"medians of {options['repeats']}; after N: frames in the context"
    )
    for dtype, ceiling in document["ceilings"].items():
        rate, products = (ceiling[f"{unit}_per_second"] / 1e9 for unit in ("bytes", "flops"))
        console.print(
            f"{dtype}: this machine reads {rate:.0f} GB/s, multiplies {products:.0f} GFLOP/s"
        )
    kinds = {key: {row[key] for row in rows} - {""} for key in ("dtype", "backend")}
    common = " ".join(one for values in kinds.values() if len(values) == 1 for one in values)
    told_apart = [key for key, values in kinds.items() if len(values) > 1] + ["strategy"]
    named = []
    for row in rows:
        name = " ".join(row[key] for key in told_apart if row[key]) + after(row, rows)
        named.append({**row, "name": name, "mark": f" {MARK}" * row["disturbed"]})
    stepped = [row for row in named if "step_ms" in row]
    tables = ("speed", SPEED, named), ("limits; parts of a step in ms", LIMITS, stepped)
    for title, texts, shown in tables if stepped else tables[:1]:
        columns = {"": "{name}{mark}", **shown_columns(texts, rows)}
        print_records(console, f"{title} {common and f'({common})'}", columns, shown)
    if disturbed := [row["name"] for row in named if row["disturbed"]]:
        console.print(disturbed_note(disturbed))


def shown_columns(texts: dict[str, str], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the columns in which any row has a number."""
    return {h: text for h, text in texts.items() if any(cell(text, row) != "-" for row in rows)}


def after(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Format a row's number of context frames, if rows differ in it."""
    counts = {other["context_frames"] for other in rows}
    return f" after {row['context_frames']}" if len(counts) > 1 else ""


def main(options: BenchOptions) -> dict[str, Any]:
    options = options.shortened()
    device = device_of(options.device)
    config = config_of(options.model, options.adapter)
    held = config.frames_held
    size = f"{min(2, max(1, held - 1))}x{config.grid_height}x{config.grid_width}"
    grid = TokenGrid.parse(options.grid or size)
    strategies, sampling = options.strategies(grid), options.sampling()
    for strategy in strategies:
        strategy.check(grid)  # before a model is loaded
    counts = options.context_frames or (1, max(1, held - grid.num_frames))
    given_alone = config.num_action_tokens or config.prefix_length
    if held == 1 and given_alone and set(counts) == {1}:
        counts = (0,)  # an image, which follows from its action or its text alone
    inputs = [
        draw_inputs(options.seed, config, grid, device, count) for count in dict.fromkeys(counts)
    ]
    load = partial(load_model, options.model, device=device, adapter=options.adapter)
    if options.model in PRESETS or options.random_weights:
        load = partial(Transformer.random, config, options.seed, device)
    rows, ceilings, has_baseline = list[Row](), {}, options.baseline == "hf"
    if options.baseline == "auto" and not (options.steps or options.temperature):
        has_baseline = config.is_llama
        if not has_baseline:
            make_console().print(f"no Hugging Face baseline: no model like {options.model} there")
    dtypes: list[DTypeName] = [choose_dtype(name, device, config) for name in options.dtype]
    for dtype in dict.fromkeys(dtypes):
        # int8 rates are not measured here: use the faster of the other two
        multiplied = [torch.float32, torch.bfloat16] if dtype == "int8" else [dtype_of(dtype)]
        ceilings[dtype] = steps.measure_ceilings(device, *multiplied)
        if has_baseline and dtype != "int8":
            run = hugging_face(load(dtype=dtype_of(dtype)), grid)
            for given in inputs:
                rows.append(Row(dtype, "", HUGGING_FACE, given.context_frames, partial(run, given)))
        for backend in options.backend:  # each consumes a model, so a large one is loaded only once
            model = load(dtype=dtype_of(dtype))
            rows += engine_rows(
                model, dtype, backend, strategies, grid, inputs, sampling, options.steps
            )
            del model
    time_rows(rows, options.repeats)
    shown = {name: value for name, value in asdict(options).items() if name != "submit"}
    document = {
        "options": json.loads(json.dumps(shown, default=str)),
        "grid": [grid.num_frames, grid.height, grid.width],
        "parameters": num_parameters(config),
        **provenance(device),
        "ceilings": {dtype: asdict(ceiling) for dtype, ceiling in ceilings.items()},
        "peak_memory_bytes": peak_memory_bytes(device),
        "rows": report_rows(rows, config, grid, ceilings),
    }
    print_rows(document)
    if options.submit:
        write_json(options.submit, document, indent=1)
    return document


def draw_inputs(
    seed: int, config: ModelConfig, grid: TokenGrid, device: torch.device, count: int
) -> Inputs:
    """Draw a random prompt of prefix and `count` frames, actions, and text states if needed."""
    generator, num_actions = torch.Generator().manual_seed(seed), config.num_action_tokens
    image_ids = 0, config.image_vocab_size
    other_ids = min(config.image_vocab_size, config.vocab_size - 1), config.vocab_size

    def draw(ids: tuple[int, int], *shape: int) -> torch.Tensor:
        return torch.randint(*ids, (1, *shape), generator=generator).to(device)

    frames = draw(image_ids, count, grid.tokens_per_frame)
    sequence = torch.cat([draw(other_ids, count, num_actions), frames], 2).flatten(1)
    prompt = torch.cat(
        [draw(other_ids, config.prefix_length), sequence[:, config.num_leading :]], 1
    )
    coming = draw(other_ids, grid.num_frames, num_actions)
    if (length := prompt.numel() + grid.num_tokens + coming.numel()) > config.max_positions:
        raise ValueError(f"prompt and grid need {length} of {config.max_positions} positions")
    text = torch.randn(1, NUM_PLACES, config.context_size, generator=generator).to(device)
    return Inputs(prompt, count, coming, text if config.context_size else None)


def config_of(name: str, adapter: Path | None = None) -> ModelConfig:
    """Return the config of a preset, or of a model in any form that `load_model` accepts."""
    if name in PRESETS and adapter is not None:
        raise ValueError(f"adapter needs a model with weights, {name} has none")
    return PRESETS[name] if name in PRESETS else find_model(name, adapter=adapter).config
