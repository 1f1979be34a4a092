"""Time the first stage of MammothModa2 at its true width, in PyTorch and by our kernels.

A picture of 32 rows of 32 tokens and a row end, guided, behind a short text. A step takes as long
with random weights as with real ones. Layers are copies of two, one with a second MLP, half of them
each, as in the model; `--layers` says how many, for a step's time is theirs and the output layer's.
PyTorch's share those two, which are larger than any cache. Steps early and late take the same time:
a sample stands for raster order.

    python -m runs.mammoth_stage --out docs/results/hybrid/mammoth_stage.json
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.console import make_console, print_records, waiting
from diagd.decoding.generate_tokens import generate_grids
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import FrameFormat
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.guidance import GuidedModel
from diagd.models.transformer import Transformer
from diagd.system import provenance
from runs.glm_stage import STD, TEXT_LENGTH

GUIDANCE, UNCONDITIONAL = 7.0, 10  # scale, and how many of the prompt's last tokens


@dataclass(frozen=True)
class Options:
    """Measure, and write a JSON file."""

    out: Path = Path("mammoth_stage.json")
    model: str = "mammothmoda2-dev"  # preset
    layers: int = 8  # of the preset's, half of them with a second MLP
    dtypes: tuple[NativeDType, ...] = ("int8",)  # of our kernels
    sample_rows: int = 1  # by raster order
    threads: int = 2


def draw_model(config: ModelConfig) -> Transformer:
    """Draw weights in bfloat16; layers of a kind share them."""
    with torch.device("meta"):
        model = Transformer(config)
    drawn, weights = dict[str, Tensor](), dict[str, Tensor]()
    for name, meta in model.state_dict().items():
        parts = name.split(".")
        if "layers" in parts:
            layer = parts.index("layers") + 1
            parts[layer] = str(int(parts[layer]) in config.visual_mlp_layers)
        if (kind := ".".join(parts)) not in drawn:
            filled = torch.empty(meta.shape, dtype=torch.bfloat16)
            drawn[kind] = filled.normal_(0, STD) if meta.dim() > 1 else filled.fill_(1)
        weights[name] = drawn[kind]
    model.load_state_dict(weights, assign=True)
    return model.eval()


def main(options: Options) -> None:
    """Time all, one after the other, and print and write the table."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    whole, half = PRESETS[options.model], options.layers // 2
    second_half = tuple(range(half, options.layers))
    config = replace(whole, num_layers=options.layers, visual_mlp_layers=second_half)
    picture = FrameFormat(config.grid_height, config.grid_width)
    sample = FrameFormat(options.sample_rows, config.grid_width)
    prompt = torch.arange(TEXT_LENGTH) + config.vocab_size
    sampling = SamplingOptions(valid_range=(0, config.image_vocab_size))
    rows = list[dict[str, Any]]()

    def measure(name: str, model: CausalModel, dtype: str, strategy: str, of: FrameFormat) -> None:
        others = [[prompt[-UNCONDITIONAL:]]]
        guided = GuidedModel(model, others, [TEXT_LENGTH], [GUIDANCE])
        with waiting(f"{name}, {dtype}, {strategy}"):
            generate_grids(guided, [prompt], [[FrameFormat(1, 2)]], "raster", sampling)  # warm-up
            stats = generate_grids(guided, [prompt], [[of]], strategy, sampling).stats
        steps = picture.grid.num_tokens
        if strategy != "raster":
            steps = picture.grid.height + picture.grid.width - 1
        a_step = stats.seconds / stats.num_steps
        row = {"name": name, "dtype": dtype, "strategy": strategy, "steps": steps}
        row |= {"a_step": a_step, "seconds": steps * a_step}
        rows.append(row | {"sampled_steps": stats.num_steps if of != picture else None})

    with waiting("drawing weights"):
        model = draw_model(config)
    measure("PyTorch", model, "bfloat16", "raster", sample)
    measure("PyTorch", model, "bfloat16", "k=1", picture)
    for dtype in options.dtypes:
        with waiting(f"packing {options.layers} layers in {dtype}"):
            native = NativeModel(model, dtype)
        measure("diagd", native, dtype, "raster", sample)
        measure("diagd", native, dtype, "k=1", picture)
        del native
    for row in rows:
        row["over_pytorch"] = rows[0]["seconds"] / row["seconds"]
    columns = {
        "": "{name} {dtype} {strategy}",
        "steps": "{steps}",
        "s a step": "{a_step:.3f}",
        "seconds": "{seconds:.1f}",
        "over PyTorch": "{over_pytorch:.1f}x",
        "sampled": "{sampled_steps}",
    }
    title = f"{options.model}, {options.layers} of {whole.num_layers} layers"
    print_records(make_console(), title, columns, rows)
    write_json(
        options.out, {"options": asdict(options), "rows": rows, **provenance(device_of("cpu"))}
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
