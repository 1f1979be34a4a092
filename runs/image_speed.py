"""Time an image by Janus-Pro-1B at its true size: transformers' own loop, raster, k=1 and k=2.

Weights are random and the same for all; a step takes as long as with real ones. Guidance runs two
rows, one after the text and one without. All run in turns, greedily, from tokens to tokens; what
reads pictures and what makes pixels are left out. runs/image_speed.sh times LlamaGen as well.

    python -m runs.image_speed --out docs/results/images/janus-pro-1b.json
"""

import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from transformers import JanusConfig, JanusForConditionalGeneration

from diagd.backends.devices import device_of
from diagd.backends.prepare import prepare
from diagd.console import make_console, print_records, progress
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.family import Source
from diagd.families.janus import JANUS
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.guidance import GuidedModel
from diagd.models.huggingface import llama_config
from diagd.models.transformer import Transformer
from diagd.system import provenance

TEXT_LENGTH, SCALE = 24, 5.0  # tokens of a short text in its template; the makers' guidance
BOS, PAD, IMAGE_START = 0, 1, 2
THEIRS = "transformers"


@dataclass(frozen=True)
class Options:
    """Measure, and write a JSON file."""

    out: Path = Path("image_speed.json")
    model: str = "janus-pro-1b"  # preset
    strategies: tuple[str, ...] = ("raster", "k=1", "k=2")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")  # of our decoder
    their_dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of transformers
    repeats: int = 2  # timed images of each; transformers' loop is timed once
    threads: int = 2


def janus_of(config: ModelConfig) -> JanusForConditionalGeneration:
    """Draw a Janus of transformers, with the least that it accepts of what is not timed."""
    side = {
        "image_size": 16 * config.grid_height,
        "patch_size": 16,
        "num_image_tokens": config.grid_height * config.grid_width,
    }
    pixels = {
        "num_embeddings": config.image_vocab_size,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1, 1],
        "num_res_blocks": 1,
        "num_patches": config.grid_height,
        "projection_dim": config.hidden_size,
        "image_token_embed_dim": config.hidden_size,
    }
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "depth": 2}
    whole = JanusConfig(
        text_config=llama_config(replace(config, vocab_size=config.extra_embeddings)),
        vision_config={**vision, **side, "projection_dim": config.hidden_size},
        vq_config=pixels,
        tie_word_embeddings=False,
    )
    model = JanusForConditionalGeneration(whole).eval()
    options: Any = model.generation_config
    options.pad_token_id, options.bos_token_id, options.eos_token_id = PAD, BOS, None
    options.generation_kwargs = {"boi_token_id": IMAGE_START}
    return model


def loop_of_transformers(model: Any, prompt: Tensor) -> Tensor:
    """Generate an image as transformers does, greedily."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_mode="image",
        guidance_scale=SCALE,
        do_sample=False,
    )


def main(options: Options) -> None:
    """Time all, one after the other in every turn, and print and write the table."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = PRESETS[options.model]
    grid = TokenGrid(1, shape.grid_height, shape.grid_width)
    body = torch.randint(3, shape.extra_embeddings, (1, TEXT_LENGTH - 2))
    given = torch.cat([torch.tensor([[BOS]]), body, torch.tensor([[IMAGE_START]])], 1)
    idle = given.clone()
    idle[:, 1:-1] = PAD
    theirs = janus_of(shape)
    source = Source(theirs.state_dict(), side=theirs.config.to_dict())
    assert JANUS.convert is not None
    config, weights = JANUS.convert(source)
    prompt, unconditional = given + config.vocab_size, idle + config.vocab_size
    work: list[tuple[str, str, str, int, Callable[[], Tensor]]] = []
    for dtype in options.their_dtypes:
        one = theirs if dtype == "float32" else deepcopy(theirs).to(getattr(torch, dtype))
        work.append((THEIRS, dtype, "", grid.num_tokens, partial(loop_of_transformers, one, given)))

    def ours(model: Any, strategy: str) -> Tensor:
        guided = GuidedModel(model, unconditional, prompt.shape[1], SCALE)
        return generate_tokens(
            guided, prompt, parse_strategy(strategy), context_frames=0, grid=grid,
            sampling=SamplingOptions(valid_range=(0, config.image_vocab_size)),
        ).tokens  # fmt: skip

    for dtype in options.dtypes:
        with torch.device("meta"):
            model = Transformer(config)
        kept = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        own = {name: tensor.to(kept) for name, tensor in weights.items()}
        model.load_state_dict(own, assign=True)
        prepared, backend = prepare(model.eval(), "auto", dtype == "int8")
        for name in options.strategies:
            steps = parse_strategy(name).schedule(grid).num_steps
            work.append((f"diagd, {name}", dtype, backend, steps, partial(ours, prepared, name)))
    times: dict[int, list[float]] = {n: [] for n in range(len(work))}
    images = dict[int, Tensor]()
    with progress("images", len(work) * options.repeats) as job:
        for turn in range(options.repeats):
            for n, (name, dtype, _, _, run) in enumerate(work):
                if name != THEIRS or not turn:
                    job.describe(f"{name} {dtype}")
                    started = time.perf_counter()
                    images[n] = run().flatten()
                    times[n].append(time.perf_counter() - started)
                job.advance()
    rows = [
        {
            "name": name,
            "dtype": dtype,
            "backend": backend,
            "steps": steps,
            "seconds": statistics.median(times[n]),
            "seconds_min": min(times[n]),
            "seconds_max": max(times[n]),
            "over_transformers": statistics.median(times[0]) / statistics.median(times[n]),
            "equal_to_transformers": (images[n] == images[0]).float().mean().item(),
        }
        for n, (name, dtype, backend, steps, _) in enumerate(work)
    ]
    columns = {
        "": "{name} {dtype}",
        "steps": "{steps}",
        "seconds": "{seconds:.1f}",
        "over HF": "{over_transformers:.1f}x",
        "= HF": "{equal_to_transformers:.0%}",
    }
    print_records(make_console(), f"an image by {options.model}", columns, rows)
    found = {"options": asdict(options), "rows": rows, **provenance(device_of("cpu"))}
    write_json(options.out, found)


if __name__ == "__main__":
    main(tyro.cli(Options))
