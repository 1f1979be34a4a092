"""MineWorld checkpoints, and other LLaMAs over visual tokens with action tokens between frames.

The weights are a plain Hugging Face LLaMA's. Its YAML config, or a Hugging Face config.json, has
the sizes; without one, they are those of the released models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source
from diagd.families.mineworld.actions import MinecraftActions
from diagd.families.presets import MINEWORLD as PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VQTokenizer, load_vq_model
from diagd.weight_files import read_tensors, tensors_under

_TOKENIZER, _TRANSFORMER = "tokenizer.", "transformer."  # prefixes of a main checkpoint
_EMBEDDING = "model.embed_tokens.weight"


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    weights = {
        name.removeprefix(_TRANSFORMER): tensor
        for name, tensor in source.tensors.items()
        if not name.startswith(_TOKENIZER)
    }
    side = _yaml_section(source.side, "transformer_config") or source.side  # or LlamaConfig's
    released, ours = PRESETS["mc-ar-300m"], MinecraftActions
    num_queries = len(weights["model.layers.0.self_attn.q_proj.weight"])
    usual = {"num_attention_heads": max(num_queries // released.head_dim, 1)}
    side = usual | {"rms_norm_eps": released.norm_eps} | dict(side)
    height = side.get("grid_height", released.grid_height)
    width = side.get("grid_width", released.grid_width)
    actions = side.get("num_action_tokens", ours.num_tokens)
    num_positions = released.frames_held * (height * width + actions)
    config = ModelConfig(
        **llama_fields(weights, side),
        image_vocab_size=int(side.get("image_vocab_size", len(weights[_EMBEDDING]) - ours.num_ids)),
        max_positions=int(side.get("max_position_embeddings", num_positions)),
        grid_height=height,
        grid_width=width,
        num_action_tokens=actions,
        tie_embeddings="lm_head.weight" not in weights,
    )
    return config, weights


def _yaml_section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for key in ("model", "params", name, "params"):
        fields = fields.get(key, {})
    return fields


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    """Build the tokenizer that the YAML names, from the main checkpoint or its own file."""
    settings = _yaml_section(found.source.side, "tokenizer_config")
    if "config_path" not in settings:
        raise ValueError(
            f"{found.path}: no config names its tokenizer: name the folder with --tokenizer"
        )
    root, tensors = found.path.parent, found.source.tensors
    is_inside = any(name.startswith(_TOKENIZER) for name in tensors)
    weights = tensors if is_inside else root / settings["ckpt_path"]
    return mineworld_tokenizer(root / settings["config_path"], weights)


def mineworld_tokenizer(config: Path, weights: Path | Mapping[str, Tensor]) -> VQTokenizer:
    """Load the VQ-VAE of a main checkpoint, under `tokenizer.model.`, or of `vae.ckpt`."""
    fields = read_json_object(config)
    tensors = read_tensors(weights) if isinstance(weights, Path) else weights
    tensors = tensors_under(_TOKENIZER, tensors) or tensors
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    where = weights if isinstance(weights, Path) else "the tokenizer"
    return VQTokenizer(load_vq_model(fields, config, plain, where), pixel_rounding="down")


MINEWORLD = Family(
    name="MineWorld",
    licence="code: MIT; weights: taken down in May 2025",
    files=("*.ckpt", "model.safetensors", "pytorch_model.bin"),
    config_fields=frozenset({"model", "model_type", "num_attention_heads"}),
    signature=(_EMBEDDING, _TRANSFORMER + _EMBEDDING),
    convert=_convert,
    tokenizer=_tokenizer,
    actions=MinecraftActions(),
    defaults=lambda found: GenerationDefaults(fps=20, context_frames=1, num_frames=15, top_p=0.8),
)
