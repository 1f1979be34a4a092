"""Weights under our names, and the model sizes that they determine."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diagd.checks import brief
from diagd.models.config import ModelConfig
from diagd.weight_files import name_tensors


def count_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Count the distinct numbers after a prefix such as `layers.`; a lone high one counts once."""
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in tensors}
    return sum(number.isdigit() for number in numbers)


def rename(
    tensors: Mapping[str, Tensor], modules: Mapping[str, str], left_out: str = "^$"
) -> dict[str, Tensor]:
    """Return views of the tensors under our names; ValueError names those that do not match.

    `modules` maps our names to theirs, which must be all except those that match `left_out`.
    `{i}` runs over the layers, and `qkv 1/3` is the second third of the rows of `qkv`. Weights,
    which are required, and biases follow their module.
    """
    layered = next(theirs for theirs in modules.values() if "{i}" in theirs)
    num_layers = count_layers(tensors, layered.partition("{i}")[0])
    renamed, missing, used = {}, [], set[str]()
    for ours, theirs in modules.items():
        for i in range(num_layers if "{i}" in theirs else 1):
            module, _, part = theirs.replace("{i}", str(i)).partition(" ")
            if f"{module}.weight" not in tensors:
                missing.append(f"{module}.weight")
            for kind in ("weight", "bias"):
                if (name := f"{module}.{kind}") in tensors:
                    used.add(name)
                    index, _, count = part.partition("/")
                    tensor = tensors[name].chunk(int(count))[int(index)] if part else tensors[name]
                    renamed[f"{ours.replace('{i}', str(i))}.{kind}"] = tensor
    unknown = [name for name in tensors if name not in used and not re.search(left_out, name)]
    if problems := name_tensors({"missing": missing, "unknown": unknown}):
        raise ValueError(problems)
    return renamed


META_NAMES = {  # our modules, except for queries, keys and values, which families name differently
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.{i}.input_layernorm": "layers.{i}.attention_norm",
    "model.layers.{i}.post_attention_layernorm": "layers.{i}.ffn_norm",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.wo",
    "model.layers.{i}.mlp.gate_proj": "layers.{i}.feed_forward.w1",
    "model.layers.{i}.mlp.up_proj": "layers.{i}.feed_forward.w3",
    "model.layers.{i}.mlp.down_proj": "layers.{i}.feed_forward.w2",
}


def sizes_of(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` determined by weights under our names."""
    embedding, block = weights["model.embed_tokens.weight"], "model.layers.0."
    vocab_size = len(weights.get("lm_head.weight", embedding))
    head_dim = len(weights[block + "self_attn.q_proj.weight"]) // num_heads
    return {
        "hidden_size": embedding.shape[1],
        "intermediate_size": len(weights[block + "mlp.up_proj.weight"]),
        "num_layers": count_layers(weights, "model.layers."),
        "num_heads": num_heads,
        "num_kv_heads": len(weights[block + "self_attn.k_proj.weight"]) // max(head_dim, 1),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "extra_embeddings": len(embedding) - vocab_size,
        "head_size": len(weights.get("head_proj.weight", ())),
    }


def with_biases(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of which only q, k and v have biases, with zeros for other projections."""
    zeros = {
        name.replace("weight", "bias"): weight.new_zeros(len(weight))
        for name, weight in weights.items()
        if re.search(r"[^qkv]_proj\.weight$", name)
    }
    return {**zeros, **weights}


def llama_fields(
    weights: Mapping[str, Tensor], side: Mapping[str, Any], usual: ModelConfig
) -> dict[str, Any]:
    """Return fields of a `ModelConfig` from weights and a config, which may omit defaults."""
    if (activation := side.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act must be silu, got {brief(activation)}")
    # the base of the rotary angles, which transformers has stored in three places
    rope = (side.get("rope_scaling") or {}) | (side.get("rope_parameters") or {})
    for name in ("rope_type", "type"):
        if rope.get(name, "default") != "default":
            raise ValueError(f"{name} must be default, got {brief(rope[name])}")
    return sizes_of(weights, int(side.get("num_attention_heads", usual.num_heads))) | {
        "max_positions": int(side.get("max_position_embeddings", usual.max_positions)),
        "norm_eps": float(side.get("rms_norm_eps", usual.norm_eps)),
        "rope_theta": float(rope.get("rope_theta", side.get("rope_theta", ModelConfig.rope_theta))),
        "bias": bool(side.get("attention_bias", False)),
    }
