"""How many sequences can share a step? Videos, or guided images, of a model with random weights.

Each count of sequences is decoded by each strategy, all in the same steps; a step takes as long as
with real weights. Prints one JSON document; nothing else should run.

    python -m runs.players --model mc-ar-300m --device cuda --sequences 1 8 32 64
    python -m runs.players --model janus-pro-1b --frames 1 --context-frames 0 --guidance 5
    python -m runs.players --model emu3 --frames 1 --context-frames 0 --steps 300 --device cuda
"""

import contextlib
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from diagd.backends.devices import device_of, dtype_of
from diagd.backends.names import Backend, DTypeChoice
from diagd.backends.prepare import choose_dtype, prepare
from diagd.benchmark.bench import draw_inputs
from diagd.benchmark.steps import Stopwatch
from diagd.console import make_console, print_records, progress
from diagd.decoding.generate_tokens import DecodingEngine, peak_memory_bytes, synchronized_time
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Strategy, parse_strategy
from diagd.families.presets import PRESETS
from diagd.models.guidance import GuidedModel
from diagd.models.transformer import Transformer
from diagd.system import provenance

TEXT_LENGTH = 24  # of a prompt where no frame, action or prefix comes before an image


@dataclass(frozen=True)
class Options:
    """Time steps of one sequence, and of many."""

    model: str = "mc-ar-300m"  # preset
    sequences: tuple[int, ...] = (1, 8)  # videos or images at once
    strategies: tuple[str, ...] = ("k=1",)
    frames: int = 2  # of each
    context_frames: int = 1  # before them; 0: they follow from a text, actions or nothing
    guidance: float | None = None  # scale; each image is then two sequences
    device: str = "cpu"  # cpu, cuda or cuda:1
    dtype: DTypeChoice = "auto"
    backend: Backend = "auto"
    steps: int | None = None  # time only so many steps of a run, evenly spaced; skip the others
    repeats: int = 3  # timed runs, after two that warm up


def main(options: Options) -> dict[str, Any]:
    """Time all; returns the document."""
    config, device = PRESETS[options.model], device_of(options.device)
    grid = TokenGrid(options.frames, config.grid_height, config.grid_width)
    strategies = [parse_strategy(name) for name in options.strategies]
    dtype = choose_dtype(options.dtype, device, config)
    model = Transformer.random(config, 0, device, dtype=dtype_of(dtype))
    prepared, backend = prepare(model, options.backend, dtype == "int8")
    rows = list[dict[str, Any]]()
    with progress(options.model, len(options.sequences) * len(strategies)) as job:
        for count in options.sequences:
            for strategy in strategies:
                job.describe(f"{count} x {strategy}")
                row = time_one(options, prepared, strategy, grid, count)
                rows.append({"sequences": count, "strategy": strategy.name, **row})
                job.advance()
    columns = {
        "at once": "{sequences}",
        "strategy": "{strategy}",
        "steps": "{steps}",
        "ms/step": "{ms_per_step:.2f}",
        "frames/s": "{frames_per_second:.2f}",
        "of each": "{frames_per_second_each:.2f}",
    }
    print_records(make_console(), f"{options.model} ({dtype} {backend})", columns, rows)
    about = {"dtype": dtype, "backend": backend, "grid": [grid.num_frames, grid.height, grid.width]}
    return {"options": asdict(options), **about, **provenance(device), "rows": rows}


def time_one(
    options: Options,
    prepared: CausalModel,
    strategy: Strategy,
    grid: TokenGrid,
    count: int,
) -> dict[str, Any]:
    """Decode so many sequences by a strategy, some times, in one memory of just their length."""
    config, device = PRESETS[options.model], prepared.device
    given = draw_inputs(0, config, grid, device, options.context_frames)
    prompt = given.prompt
    if not prompt.numel():
        room = config.max_positions - grid.num_tokens - given.actions.numel()
        prompt = prompt.new_zeros(1, min(TEXT_LENGTH, room))
    stopwatch = model = Stopwatch(prepared, False, options.steps)
    if options.guidance is not None:
        others = prompt if prompt.numel() else given.actions[:, 0]
        model = GuidedModel(model, others, others.shape[1], options.guidance)
    engine = DecodingEngine(
        model,
        config.frame,
        count,
        SamplingOptions(),
        context=given.text,
        max_slots=prompt.shape[1] + grid.num_tokens + given.actions.numel(),
    )
    seconds, capture_seconds = list[float](), 0.0
    for turn in range(options.repeats + 2):
        engine.prefill(prompt.expand(count, -1), options.context_frames)
        if strategy.has_schedule:
            stopwatch.begin(strategy.schedule(grid).num_steps)
        started = synchronized_time(device)
        list(engine.decode(strategy, given.actions.expand(count, -1, -1)))
        took = synchronized_time(device) - started - engine.capture_seconds
        capture_seconds += engine.capture_seconds
        times = stopwatch.collect().seconds
        if options.steps:
            took = statistics.mean(times) * engine.stream.num_steps
        if turn > 1:
            seconds.append(took)
    middle, num_steps = statistics.median(seconds), engine.stream.num_steps
    return {
        "steps": num_steps,
        "seconds": [round(one, 5) for one in seconds],
        "ms_per_step": 1000 * middle / num_steps,
        "frames_per_second": count * grid.num_frames / middle,
        "frames_per_second_each": grid.num_frames / middle,
        "capture_seconds": capture_seconds,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


if __name__ == "__main__":
    given = tyro.cli(Options, description=__doc__)
    with contextlib.redirect_stdout(sys.stderr):
        document = main(given)
    print(json.dumps(document))
