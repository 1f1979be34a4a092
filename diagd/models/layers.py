"""Layers of the decoder: norms, attention over given keys, MLPs.

Module names are LLaMA's, so a Hugging Face LLaMA state dict loads untranslated. Attention takes a
mask over cache slots and knows neither what a slot stands for nor in which order slots are written.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diagd.models.cache import StaticKVCache
from diagd.models.config import ModelConfig
from diagd.models.rotary import rotate

Visible = Tensor | BlockMask | None  # (L, M) bool, or what FlexAttention makes of it; None: causal


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, weight in the input's dtype, like LLaMA's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def make_norm(config: ModelConfig, affine: bool = True) -> nn.Module:
    """Build the norm the config names, over hidden_size."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(
        config.hidden_size, config.norm_eps, elementwise_affine=affine, bias=config.bias
    )


class Attention(nn.Module):
    """Grouped-query self-attention, causal over its own tokens or masked over a cache."""

    mergeable: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.layer, self.head_dim = layer, config.head_dim
        self.widths = width, kv_width, kv_width
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.qkv_proj: nn.Module | None = None  # all three in one, after merge_linears
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
        visible: Visible,
        cache: StaticKVCache | None,
    ) -> Tensor:
        """Attend from every lane of x.

        Args:
            x: (B, L, hidden_size).
            rotary: Cosines and sines, each (L, head_dim / 2); None rotates nothing.
            slots: (L,) int64, where the cache takes this call's keys and values.
            visible: (L, M) bool, True = may attend; M counts cache slots, or is L without a cache.
                None means causal. Without a cache also a BlockMask, to be compiled.
            cache: Buffers to write and then read; None attends to this call's own tokens.

        Returns:
            (B, L, hidden_size).
        """
        if self.qkv_proj is None:
            projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            projected = self.qkv_proj(x).split(self.widths, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projected
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if rotary is not None:
            queries, keys = rotate(queries, *rotary), rotate(keys, *rotary)
        if cache is not None and slots is not None and isinstance(visible, Tensor):
            cache.write(self.layer, slots, keys, values)
            keys, values = cache.read(self.layer, visible.shape[1])
        return self.o_proj(attend(queries, keys, values, visible).transpose(1, 2).flatten(2))


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible) -> Tensor:
    """Softmax attention of (B, heads, L, D) queries over (B, kv_heads, M, D) keys and values.

    With a mask, the query heads that share a key head become more lanes of that head: keys and
    values are then read once and never repeated, and every SDPA kernel takes it.

    Args:
        queries: (B, heads, L, D).
        keys: (B, kv_heads, M, D); kv_heads divides heads.
        values: (B, kv_heads, M, D).
        visible: (L, M) bool, True = may attend; None means causal, and then L = M. A BlockMask is
            for FlexAttention, which skips what nobody sees but has to be compiled to be quick.

    Returns:
        (B, heads, L, D).
    """
    num_heads, num_lanes = queries.shape[1:3]
    group = num_heads // keys.shape[1]
    if isinstance(visible, BlockMask):
        return flex_attention(queries, keys, values, block_mask=visible, enable_gqa=group > 1)  # pyright: ignore[reportReturnType]
    if visible is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=group > 1
        )
    if group == 1:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
    folded = queries.unflatten(1, (-1, group)).flatten(2, 3)  # (B, kv_heads, group * L, D)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=visible.repeat(group, 1))
    return out.unflatten(2, (group, num_lanes)).flatten(1, 2)


class SwiGLU(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    mergeable: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.gate_up_proj: nn.Module | None = None  # both, after merge_linears
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to the same shape."""
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GELU(nn.Module):
    """Plain MLP with the tanh-approximated GELU of GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to the same shape."""
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.norm_affine)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = make_norm(config, config.norm_affine)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GELU(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
        visible: Visible,
        cache: StaticKVCache | None,
    ) -> Tensor:
        """Add attention and MLP to the residual stream x; arguments as in `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, slots, visible, cache)
        return x + self.mlp(self.post_attention_layernorm(x))
