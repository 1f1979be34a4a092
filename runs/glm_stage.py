"""Time the first stage of GLM-Image at its true size: transformers' loop, raster, exact, k=1, k=2.

A picture of 1024 x 1024 pixels behind a short text: a preview of 16 x 16 tokens, then 32 x 32. A
step takes as long with random weights as with real ones. One layer is drawn: ours are packed copies
of it, those of transformers share it, as it is larger than any cache. An outlier in a norm, which
trained models have, gives activations two digits in int8.

Steps early and late take the same time, so a sample of `transformers`, raster and exact decoding
stands for all of their tokens; k=1 and k=2 write both grids. How many tokens a step of exact
decoding writes depends on the weights: random ones are the hardest to draft.

    python -m runs.glm_stage --out docs/results/hybrid/glm_stage.json
    python -m runs.glm_stage --device cuda --their-dtypes bfloat16
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from transformers import GlmImageConfig, GlmImageForConditionalGeneration

from diagd.backends.devices import device_of, dtype_of
from diagd.backends.names import Backend
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.backends.prepare import prepare
from diagd.console import make_console, print_records, waiting
from diagd.decoding.generate_tokens import generate_grids, synchronized_time
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import FrameFormat
from diagd.families.family import Source
from diagd.families.glm_image import GLM_IMAGE
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.pipeline.glm_image import grids_of
from diagd.system import provenance

THEIRS, TEXT_LENGTH, OUTLIER, STD = "transformers", 24, 9.0, 0.02
FIRST, LAYERS = "layers.0.", "model.language_model.layers."


@dataclass(frozen=True)
class Options:
    """Measure, and write a JSON file."""

    out: Path = Path("glm_stage.json")
    model: str = "glm-image-9b"  # preset
    layers: int = 40  # fewer where memory is short; the file says how many
    device: str = "cpu"  # or cuda
    backend: Backend = "auto"  # of our decoder, on a GPU; on a CPU our kernels
    dtype: NativeDType | None = None  # of our decoder; default: int8 on a CPU, bfloat16 on a GPU
    their_dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    size_px: tuple[int, int] = (1024, 1024)  # height and width
    sample_rows: int = 1  # of a preview, by raster and exact decoding
    their_steps: int = 5  # timed steps of transformers' loop
    threads: int = 2


def config_of(shape: ModelConfig) -> GlmImageConfig:
    """Return a config of transformers; what reads pictures is small, and does not run."""
    text = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size + shape.extra_embeddings,
        "vision_vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "eos_token_id": shape.image_vocab_size + 1,
        "pad_token_id": shape.vocab_size,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 2 * sum(shape.rotary_sections) / shape.head_dim,
            "mrope_section": [*shape.rotary_sections],
        },
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
    codes = {"num_embeddings": shape.image_vocab_size, "embed_dim": 8, "latent_channels": 16}
    return GlmImageConfig(text_config=text, vision_config=vision, vq_config=codes)


def draw_weights(config: GlmImageConfig) -> dict[str, Tensor]:
    """Draw weights in bfloat16, under transformers' names; all layers share those of the first."""
    with torch.device("meta"):
        empty = GlmImageForConditionalGeneration(config)
    weights = dict[str, Tensor]()
    for name, meta in empty.state_dict().items():
        layer, _, rest = name.removeprefix(LAYERS).partition(".")
        if name.startswith(LAYERS) and layer != "0":
            weights[name] = weights[f"{LAYERS}0.{rest}"]
        elif meta.dim() > 1:
            weights[name] = torch.empty(meta.shape, dtype=torch.bfloat16).normal_(0, STD)
        else:
            weights[name] = torch.full(meta.shape, float("bias" not in name), dtype=torch.bfloat16)
    weights["model.language_model.norm.weight"][0] = OUTLIER
    return weights


def theirs_of(config: GlmImageConfig, weights: dict[str, Tensor], *to: Any) -> Any:
    """Build transformers' class around weights, of a device and type."""
    with torch.device("meta"):
        model: Any = GlmImageForConditionalGeneration(config)
    cast = {weight.data_ptr(): weight.to(*to) for weight in weights.values()}
    own = {name: cast[weight.data_ptr()] for name, weight in weights.items()}
    model.load_state_dict(own, assign=True)
    language = model.model.language_model
    language.rotary_emb = type(language.rotary_emb)(config.text_config).to(to[0])
    return model.eval()


def ours_of(
    config: GlmImageConfig,
    weights: dict[str, Tensor],
    device: torch.device,
    dtype: NativeDType,
    backend: Backend,
) -> CausalModel:
    """Convert one layer; as many copies as there are layers are packed, or put on a GPU."""
    first = {name: one for name, one in weights.items() if LAYERS not in name or FIRST in name}
    assert GLM_IMAGE.convert is not None
    shape, found = GLM_IMAGE.convert(Source(first, side=config.to_dict()))
    shape = replace(shape, num_layers=config.text_config.num_hidden_layers)
    with torch.device("meta"):
        model = Transformer(shape)
    of = {
        name: f"model.{FIRST}{name.split('.', 3)[3]}"
        for name in model.state_dict()
        if "layers." in name
    }
    model.load_state_dict(
        {name: found[of.get(name, name)] for name in model.state_dict()}, assign=True
    )
    if device.type == "cpu":
        return NativeModel(model, dtype)
    return prepare(model.to(device, dtype_of(dtype)), backend, dtype == "int8")[0]


def time_theirs(model: Any, prompt: Tensor, grids: list[FrameFormat], steps: int) -> float:
    """Return the seconds of a step of transformers' own loop."""
    sizes = torch.tensor([[1, one.height, one.width] for one in reversed(grids)])
    config = model.config
    others = [*range(config.vq_config.num_embeddings, config.text_config.vision_vocab_size)]
    drawn = {"do_sample": True, "temperature": 0.9, "top_p": 0.75, "top_k": 0}

    def write(count: int) -> float:
        started = synchronized_time(model.device)
        told = {"image_grid_thw": sizes, "suppress_tokens": others, **drawn}
        model.generate(prompt[None], max_new_tokens=count, **told)
        return synchronized_time(model.device) - started

    write(2)  # warm-up
    before = write(1)
    return (write(1 + steps) - before) / steps


def main(options: Options) -> None:
    """Time all, one after the other, and print and write the table."""
    device = device_of(options.device)  # or an error before work begins
    our_dtype = options.dtype or ("int8" if device.type == "cpu" else "bfloat16")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = replace(PRESETS[options.model], num_layers=options.layers)
    config, codes = config_of(shape), shape.image_vocab_size
    grids = [*grids_of(*options.size_px)]
    sample = [FrameFormat(options.sample_rows, grids[0].width)]
    num_tokens = sum(one.grid.num_tokens for one in grids)
    words = torch.arange(TEXT_LENGTH) + shape.vocab_size + 1
    prompt = torch.cat([words, torch.tensor([codes])])
    rows = list[dict[str, Any]]()
    with waiting("drawing weights"):
        weights = draw_weights(config)
    for dtype in options.their_dtypes:
        with waiting(f"{THEIRS}, {dtype}"):
            theirs = theirs_of(config, weights, device, getattr(torch, dtype))
            seconds = time_theirs(theirs, prompt.to(device), grids, options.their_steps)
            del theirs
        row = {"steps": num_tokens, "seconds": num_tokens * seconds, "a_step": seconds}
        rows.append({"name": THEIRS, "dtype": dtype, "sampled_steps": options.their_steps, **row})
    with waiting(f"packing {options.layers} layers"):
        model = ours_of(config, weights, device, our_dtype, options.backend)
        del weights
    sampling = SamplingOptions(0.9, top_p=0.75, valid_range=(0, codes))
    written = dict[str, Tensor]()
    prompt = prompt.to(device)
    generate_grids(model, [prompt], [[FrameFormat(1, 2)]], "raster", sampling)  # warm-up
    for name in ("raster", "exact", "k=1", "k=2"):
        formats = sample if name in ("raster", "exact") else grids
        with waiting(f"diagd, {name}"):
            out = generate_grids(model, [prompt], [formats], name, sampling)
        stats, written[name] = out.stats, out.tokens[0][0]
        share = num_tokens / sum(one.grid.num_tokens for one in formats)
        row = {
            "steps": round(share * stats.num_steps),
            "seconds": stats.prefill_seconds + share * stats.seconds,
            "a_step": stats.seconds / stats.num_steps,
            "sampled_steps": stats.num_steps if share > 1 else None,
        }
        rows.append({"name": f"diagd, {name}", "dtype": our_dtype, **row})
    for row in rows:
        row["over_transformers"] = rows[0]["seconds"] / row["seconds"]
    columns = {
        "": "{name} {dtype}",
        "steps": "{steps}",
        "s a step": "{a_step:.2f}",
        "seconds": "{seconds:.0f}",
        "over HF": "{over_transformers:.1f}x",
        "sampled": "{sampled_steps}",
    }
    size = "x".join(map(str, options.size_px))
    print_records(
        make_console(), f"{size} by {options.model}, {options.layers} layers", columns, rows
    )
    found = {
        "options": asdict(options),
        "rows": rows,
        "exact_equals_raster": torch.equal(written["raster"], written["exact"]),
        **provenance(device),
    }
    write_json(options.out, found)


if __name__ == "__main__":
    main(tyro.cli(Options))
