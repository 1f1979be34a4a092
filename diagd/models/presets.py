"""Shapes of the models people have, by name: `Transformer.random(PRESETS[name])` for benchmarks."""

import math

from diagd.models.config import ModelConfig


def _mc_ar(hidden_size: int, intermediate_size: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=20,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=8262,
        image_vocab_size=8192,
        max_positions=5552,
        grid_height=14,
        grid_width=24,
        num_action_tokens=11,
    )


def _doom(hidden_size: int, num_layers: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 14 // 5 // 64 * 64,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_kv_heads=hidden_size // 64,
        head_dim=64,
        vocab_size=1030,
        image_vocab_size=1024,
        max_positions=8 * 337 - 1,
        grid_height=14,
        grid_width=24,
        num_action_tokens=1,
        bias=True,
        position="rope3d",
        rope_theta=100.0,
        rope_step=math.pi,
    )


def _cosmos(
    hidden_size: int, num_layers: int, yarn_factor: float, text: bool = False
) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=14336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=64000,
        image_vocab_size=64000,
        max_positions=12801 if text else 12800,
        grid_height=40,
        grid_width=64,
        qk_norm=True,
        position="rope3d",
        rope_theta=500000.0,
        yarn_factor=yarn_factor,
        prefix_length=1 if text else 0,
        extra_embeddings=64 if text else 0,
        context_size=1024 if text else 0,
        position_table=text,
    )


def _wham(hidden_size: int, num_layers: int, num_heads: int, norm_affine: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=16452,
        image_vocab_size=16384,
        max_positions=5560,
        grid_height=18,
        grid_width=30,
        num_action_tokens=16,
        norm="layer",
        norm_affine=norm_affine,
        mlp="gelu",
        bias=True,
        position="learned",
        tie_embeddings=True,
    )


PRESETS: dict[str, ModelConfig] = {
    "mc-ar-doom": _doom(hidden_size=320, num_layers=6),  # the bundled world model
    "mc-ar-doom-small": _doom(hidden_size=192, num_layers=4),  # beside it, to compare sizes
    "mc-ar-42m": ModelConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=8448,
        image_vocab_size=8192,
        max_positions=5552,
        grid_height=14,
        grid_width=24,
        num_action_tokens=11,
    ),
    "mc-ar-300m": _mc_ar(hidden_size=1024, intermediate_size=4096, num_heads=16),
    "mc-ar-700m": _mc_ar(hidden_size=2048, intermediate_size=4096, num_heads=32),
    "mc-ar-1.2b": _mc_ar(hidden_size=2048, intermediate_size=8192, num_heads=32),
    "cosmos-4b": _cosmos(hidden_size=4096, num_layers=16, yarn_factor=1.0),
    "cosmos-5b": _cosmos(hidden_size=4096, num_layers=16, yarn_factor=1.0, text=True),
    "cosmos-12b": _cosmos(hidden_size=5120, num_layers=40, yarn_factor=2.0),
    "cosmos-13b": _cosmos(hidden_size=5120, num_layers=40, yarn_factor=2.0, text=True),
    "wham-200m": _wham(hidden_size=1024, num_layers=16, num_heads=16, norm_affine=False),
    "wham-1.6b": _wham(hidden_size=2304, num_layers=24, num_heads=18, norm_affine=True),
}
