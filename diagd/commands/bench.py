"""Time strategies side by side on the same weights: raster, diagonals, exact, Hugging Face.

Speedup is over raster of the same dtype and backend. Efficiency is the speedup divided by the cut
in steps: 1 means that a step of many lanes costs what a step of one lane costs, so the whole cut
became wall-clock. All rows run in turns, so a machine that slows down slows all of them; the first
run of each (with compilation) is timed apart.

    diagd bench --model mc-ar-42m --grid 2x14x24 -k 1 2 4 --dtype int8
    diagd bench --quick
    diagd bench --strategy exact zipar=4 --temperature 1 --baseline none
"""

from dataclasses import asdict
from typing import Any

import torch

from diagd.backends.devices import DTypeName, device_of, dtype_of
from diagd.backends.prepare import choose_dtype
from diagd.benchmark.options import BenchOptions
from diagd.benchmark.rows import (
    Inputs,
    Row,
    engine_rows,
    hugging_face_rows,
    print_rows,
    report_rows,
    time_rows,
)
from diagd.benchmark.steps import measure_ceilings
from diagd.decoding.generate_tokens import peak_memory_bytes
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.strategy import Conditions
from diagd.families.checkpoints import load_model, model_path, read_config
from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import provenance
from diagd.tokenizers.text import NUM_PLACES


def main(options: BenchOptions) -> dict[str, Any]:
    """Time every row and print the tables."""
    options = options.shortened()
    device = device_of(options.device)
    config = config_of(options.model)
    grid = TokenGrid.parse(options.grid or f"2x{config.grid_height}x{config.grid_width}")
    strategies, sampling = options.strategies(grid), options.sampling()
    for strategy in strategies:
        strategy.check(Conditions(sampling.temperature, grid))  # before a model is loaded
    fit = max(1, config.frames_held - grid.num_frames)
    counts = dict.fromkeys(options.context_frames or (1, fit))
    inputs = [_inputs(options, config, grid, device, count) for count in counts]
    rows, ceilings = list[Row](), {}
    dtypes: list[DTypeName] = [choose_dtype(name, device, config) for name in options.dtype]
    for dtype in dict.fromkeys(dtypes):
        # of products of bytes nothing is known here: the faster of the other two stands in
        multiplied = [torch.float32, torch.bfloat16] if dtype == "int8" else [dtype_of(dtype)]
        ceilings[dtype] = measure_ceilings(device, *multiplied)
        if options.baseline == "hf" and dtype != "int8":
            model = _model(options, config, dtype, device)
            rows += hugging_face_rows(model, dtype, grid, inputs)
            del model
        for backend in options.backend:  # each uses up a model: a large one is there once
            model = _model(options, config, dtype, device)
            rows += engine_rows(
                model, dtype, backend, strategies, grid, inputs, sampling, options.steps
            )
            del model
    time_rows(rows, options.repeats)
    document = {
        "options": asdict(options),
        "grid": [grid.num_frames, grid.height, grid.width],
        "parameters": num_parameters(config),
        **provenance(device),
        "ceilings": {dtype: asdict(ceiling) for dtype, ceiling in ceilings.items()},
        "peak_memory_bytes": peak_memory_bytes(device),
        "rows": report_rows(rows, config, grid, ceilings),
    }
    print_rows(document)
    return document


def _inputs(
    options: BenchOptions, config: ModelConfig, grid: TokenGrid, device: torch.device, count: int
) -> Inputs:
    """Draw a prompt of prefix and `count` frames, actions, and a text where one is read."""
    generator, num_actions = torch.Generator().manual_seed(options.seed), config.num_action_tokens
    image_ids = 0, config.image_vocab_size
    other_ids = min(config.image_vocab_size, config.vocab_size - 1), config.vocab_size

    def draw(ids: tuple[int, int], *shape: int) -> torch.Tensor:
        return torch.randint(*ids, (1, *shape), generator=generator).to(device)

    frames = draw(image_ids, count, grid.tokens_per_frame)
    sequence = torch.cat([draw(other_ids, count, num_actions), frames], 2).flatten(1)
    prompt = torch.cat([draw(other_ids, config.prefix_length), sequence[:, num_actions:]], 1)
    coming = draw(other_ids, grid.num_frames, num_actions)
    length = prompt.numel() + grid.num_tokens + coming.numel()
    if length > config.max_positions:
        raise ValueError(f"prompt and grid take {length} of {config.max_positions} positions")
    text = torch.randn(1, NUM_PLACES, config.context_size, generator=generator).to(device)
    return Inputs(prompt, count, coming, text if config.context_size else None)


def num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


def config_of(name: str) -> ModelConfig:
    """Return the shape of a preset, of the bundled model or of a folder."""
    if name in PRESETS:
        return PRESETS[name]
    return read_config(model_path(name) / "config.json")


def _model(
    options: BenchOptions, config: ModelConfig, dtype: DTypeName, device: torch.device
) -> Transformer:
    if options.model in PRESETS or options.random_weights:
        return Transformer.random(config, options.seed, device, dtype_of(dtype))
    return load_model(options.model, device=device, dtype=dtype_of(dtype))
