"""Two-layer models of every kind, on a grid that is not square."""

from typing import Any

import torch
from torch import Tensor, nn

from diagd.backends.linears import round_to_int8
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "multi-head": {"num_kv_heads": 4},
    "multi-query": {"num_kv_heads": 1},
    "world": {"num_kv_heads": 4, "bias": True, "position": "rope3d", "rope_step": 3.0},
    "sliding": {
        "num_kv_heads": 4,
        "bias": True,
        "position": "rope3d",
        "rope_step": 3.0,
        "sliding_window": 11,  # less than a frame
        "sliding_layers": (0,),
    },
    "cosmos": {"position": "rope3d", "qk_norm": True, "yarn_factor": 2.0, "extra_embeddings": 3},
    "chameleon": {"qk_norm": True, "head_norm": True, "head_size": 20},  # and Janus
    "llamagen": {"num_kv_heads": 4, "position": "rope2d"},
    "glm-image": {  # all heads together are narrower than the stream
        "hidden_size": 40,
        "bias": True,
        "post_norms": True,
        "position": "mrope",
        "rotary_sections": (1, 1, 1),  # a pair stays
    },
    "wham": {
        "num_kv_heads": 4,
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
        "position": "learned",
        "tie_embeddings": True,
    },
    "mammothmoda2": {"visual_mlp_layers": (1,), "extra_embeddings": 3},
    "wham-v2": {"norm": "layer", "norm_affine": False, "mlp": "gelu", "position": "learned"},
}


def tiny_fields(**changes: Any) -> dict[str, Any]:
    """Fields of a GQA LLaMA-like decoder of a 3 x 5 grid with two action tokens a frame."""
    fields = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "image_vocab_size": 44,
        "max_positions": 64,
        "grid_height": 3,
        "grid_width": 5,
        "num_action_tokens": 2,
    }
    return {**fields, **changes}


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    """Seeded weights five times the usual width, so that logits and attention are far from flat."""
    model = Transformer.random(ModelConfig(**tiny_fields(**changes)), seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
            else:
                weight.add_(torch.linspace(-0.2, 0.2, len(weight)))
    return model


def with_int8_weights(model: Transformer) -> Transformer:
    """Widen what 8 bits of the weights keep: embeddings as bfloat16, a scale for each column."""
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        if model.lm_head is None:
            model.lm_head = nn.Linear(*reversed(table.shape), bias=False)
            model.lm_head.weight.copy_(table)
        table.copy_(table.bfloat16())
        for module in model.modules():
            if isinstance(module, nn.Linear):
                whole, scales = round_to_int8(module.weight)
                module.weight.copy_(whole * scales[:, None])
    return model


def with_outliers(model: Transformer, gain: float = 40.0) -> Transformer:
    """Let a column stand out of every norm, as in trained language models."""
    block: Any
    norms: list[Any] = [model.model.norm]
    for block in model.model.blocks:
        norms += block.input_layernorm, block.post_attention_layernorm
    with torch.no_grad():
        for norm in norms:
            norm.weight[3] = gain
    return model


def random_tokens(*shape: int, seed: int = 0, vocab_size: int = 50) -> Tensor:
    """Seeded token ids."""
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
