"""Attention over given keys: of the sequence itself, through a cache, and of a text beside it.

Self-attention takes a mask over cache slots and knows neither what a slot stands for nor in which
order slots are written. A backend may bring a kernel that makes no mask (`RuleKernel`).
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diagd.decoding.visibility import SlotRule
from diagd.models.cache import StaticKVCache
from diagd.models.config import ModelConfig
from diagd.models.layers import RMSNorm
from diagd.models.rotary import rotate


class RuleKernel(NamedTuple):
    """In place of a mask over cache slots: the rule that it follows from, and what applies it.

    Attributes:
        kernel: (queries, keys, values, positions, *rule) -> (B, heads, L, D), as `attend` with the
            mask `diagd.decoding.visibility.visible_slots(positions, *rule)`.
        positions: (L,) int64, where the lanes stand in raster order.
        rule: the rest.
    """

    kernel: Callable[..., Tensor]
    positions: Tensor
    rule: SlotRule

    @property
    def shape(self) -> tuple[int, int]:
        """Of the mask: lanes and slots."""
        return self.rule.shape


class MaskKernel(NamedTuple):
    """A mask as a backend's kernel takes it, and that kernel; without a cache.

    Attributes:
        kernel: (queries, keys, values, mask) -> (B, heads, L, D), as `attend` with the mask (L, L).
        mask: what it made of the mask, tensors.
    """

    kernel: Callable[..., Tensor]
    mask: tuple[Tensor, ...]


# (L, M) bool; or what FlexAttention or a kernel makes of it; or what needs none; None: causal
Visible = Tensor | BlockMask | MaskKernel | RuleKernel | None


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
                None means causal. Without a cache also a MaskKernel or (to be compiled) a
                BlockMask; with one also a RuleKernel.
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
        if cache is not None and slots is not None and isinstance(visible, Tensor | RuleKernel):
            cache.write(self.layer, slots, keys, values)
            keys, values = cache.read(self.layer, visible.shape[1])
        return self.o_proj(attend(queries, keys, values, visible).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Grouped-query attention from the sequence to a text, without positions (Cosmos V2W)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.k_proj = nn.Linear(config.context_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.context_size, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, kv_heads, M, head_dim) of a text (B, M, context_size)."""
        keys, values = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.k_proj(context), self.v_proj(context))
        )
        return (keys if self.k_norm is None else self.k_norm(keys)), values

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from x (B, L, hidden_size) to all of the projected keys and values."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        visible = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool, device=x.device)
        out = attend(queries, keys, values, visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible) -> Tensor:
    """Softmax attention of (B, heads, L, D) queries over (B, kv_heads, M, D) keys and values.

    With a mask, the query heads that share a key head become more lanes of that head: keys and
    values are then read once and never repeated, and every SDPA kernel takes it.

    Args:
        queries: (B, heads, L, D).
        keys: (B, kv_heads, M, D); kv_heads divides heads.
        values: (B, kv_heads, M, D).
        visible: (L, M) bool, True = may attend; None means causal, and then L = M.
            A BlockMask is for FlexAttention, which skips what nobody sees but has to be compiled
            to be quick. A MaskKernel and a RuleKernel attend by themselves.

    Returns:
        (B, heads, L, D).
    """
    if isinstance(visible, RuleKernel):
        return visible.kernel(queries, keys, values, visible.positions, *visible.rule)
    if isinstance(visible, MaskKernel):
        return visible.kernel(queries, keys, values, visible.mask)
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
