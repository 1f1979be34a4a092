"""Memory of finetuning: what is estimated against what is kept, and the table of the docs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer, num_parameters
from diagd.training.adapters import attach
from diagd.training.memory import estimate_memory
from diagd.training.train import FinetuneOptions, finetune
from tests.training.runs import options_maker
from tests.worlds import write_shard_model

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
MODELS = {
    "MC-AR 300M": "mc-ar-300m",
    "MC-AR 700M": "mc-ar-700m",
    "WHAM 1.6B": "wham-1.6b",
    "Cosmos 4B": "cosmos-4b",
    "Janus-Pro 7B": "janus-pro-7b",
    "GLM-Image 9B": "glm-image-9b",
    "Cosmos 13B": "cosmos-13b",
    "Emu3.5 34B": "emu3.5",
}
WAYS = (
    {},
    {"lora": 16},
    {"lora": 16, "recompute": True},
    {"lora": 16, "recompute": True, "int8": True},
)


def options_of(**changes) -> FinetuneOptions:
    plain = {"init": "maze", "tokens": Path("tokens"), "out": Path("out"), "frames": 2}
    return FinetuneOptions(**{**plain, "precision": "bf16", "optimizer": "adamw", **changes})


def gigabytes(config: ModelConfig, way: Mapping[str, Any]) -> str:
    frames = 2 if config.frames_held > 1 else 1
    lanes = frames * (config.tokens_per_frame + config.num_action_tokens + config.grid_height)
    return f"{estimate_memory(config, options_of(**way), 1, lanes).total / 1e9:.1f}"


def table() -> str:
    lines = ["| GB | weights | all weights | rank 16 | + `--recompute` | + `--int8` |"]
    lines.append("|---|---|---|---|---|---|")
    for name, preset in MODELS.items():
        config = PRESETS[preset]
        cells = (gigabytes(config, way) for way in WAYS)
        weights = f"{num_parameters(config) / 1e9:.2f}B"
        lines.append(f"| {name} | {weights} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_the_page_is_what_runs_are_told():
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("preset", ["mc-ar-320x6", "llamagen-b", "wham-200m"])
def test_activations_are_what_a_backward_pass_keeps(preset, precision):
    fields = {"num_layers": 4, "vocab_size": 512, "image_vocab_size": 256}
    config, num_lanes = replace(PRESETS[preset], **fields), 60
    model, options = Transformer.random(config), options_of(lora=4, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    attach(model, options, dtype)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = dict[int, int]()

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(256, (2, num_lanes), generator=torch.Generator().manual_seed(0))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype, precision == "bf16"),
    ):
        model.logits(tokens).log_softmax(-1)
    measured = sum(size for place, size in kept.items() if place not in own)
    estimate = estimate_memory(config, options, 2, num_lanes)
    assert 0.6 < measured / estimate.activations <= 1


def test_what_cannot_fit_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    init = write_shard_model(tmp_path / "init")
    options = options_maker(FinetuneOptions, tmp_path, init=str(init), frames=4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"total": 200_000}))
    for changes, advice in (({}, "--lora, a smaller"), ({"lora": 2}, "--int8, a smaller")):
        message = (
            rf"finetuning needs about 0.00 GB .* has 0.0 GB: use {advice} --batch-size or fewer"
        )
        with pytest.raises(ValueError, match=message):
            finetune(options(**changes))
    assert not options().out.exists()
