"""LLaMAs under Meta's and transformers' names: modules, sizes of weights, facts of configs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diagd.families.family import count_layers
from diagd.models.config import ModelConfig

META_NAMES = {  # our modules, but for queries, keys and values, which families name differently
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


def llama_fields(weights: Mapping[str, Tensor], side: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a `ModelConfig` from weights under LLaMA's names and a config.

    The config has `num_attention_heads` and `rms_norm_eps` in any case.
    """
    if (activation := side.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act must be silu, got {activation!r}")
    # the base of the rotary angles, which transformers has written in three places
    rope = (side.get("rope_scaling") or {}) | (side.get("rope_parameters") or {})
    for name in ("rope_type", "type"):
        if rope.get(name, "default") != "default":
            raise ValueError(f"{name} must be default, got {rope[name]!r}")
    num_heads = int(side["num_attention_heads"])
    head_dim = len(weights["model.layers.0.self_attn.q_proj.weight"]) // num_heads
    return {
        "hidden_size": weights["model.embed_tokens.weight"].shape[1],
        "intermediate_size": len(weights["model.layers.0.mlp.gate_proj.weight"]),
        "num_layers": count_layers(weights, "model.layers."),
        "num_heads": num_heads,
        "num_kv_heads": len(weights["model.layers.0.self_attn.k_proj.weight"]) // head_dim,
        "head_dim": head_dim,
        "norm_eps": float(side["rms_norm_eps"]),
        "rope_theta": float(rope.get("rope_theta", side.get("rope_theta", ModelConfig.rope_theta))),
        "bias": bool(side.get("attention_bias", False)),
    }
