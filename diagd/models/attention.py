"""Layers of the decoder with LLaMA's names: norms, MLPs, attention, and its cache."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diagd.models.config import ModelConfig
from diagd.models.rotary import rotate
from diagd.system import check_memory


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, weight in the input's dtype, like LLaMA's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:  # one kernel, not eight; it rounds once
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class HeadNorm(nn.Module):
    """LayerNorm over each head of (B, heads, L, head_dim), with parameters for each head."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_dim))
        self.head_dim, self.eps = head_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (own.view(-1, 1, self.head_dim) for own in (self.weight, self.bias))
        return F.layer_norm(x, (self.head_dim,), eps=self.eps) * weight + bias


def make_norm(config: ModelConfig, affine: bool = True) -> nn.Module:
    size, eps = config.hidden_size, config.norm_eps
    if config.norm == "rms":
        return RMSNorm(size, eps)
    return nn.LayerNorm(size, eps, elementwise_affine=affine, bias=config.bias)


def make_head_norm(config: ModelConfig, num_heads: int) -> nn.Module:
    if not config.qk_norm:
        return nn.Identity()
    if config.head_norm:
        return HeadNorm(num_heads, config.head_dim, config.norm_eps)
    return RMSNorm(config.head_dim, config.norm_eps)


class SwiGLU(nn.Module):
    mergeable: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.gate_up_proj: nn.Module | None = None  # both, after merge_linears
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GELU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)
        self.approximate = "none" if config.mlp == "exact_gelu" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))


def keep_lanes(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the last lanes of (B, L, size), 0 for all, or those given by a tensor."""
    is_number = isinstance(logits_to_keep, int)
    return hidden[:, slice(-logits_to_keep, None) if is_number else logits_to_keep]


def check_sizes(batch_size: int, num_slots: int, context: Tensor | None = None) -> None:
    """Raise ValueError for a cache without rows or slots, and for a context if there is none."""
    refuse_context(context)
    if batch_size < 1 or num_slots < 1:
        raise ValueError(
            f"batch_size and num_slots must be at least 1, got {batch_size} and {num_slots}"
        )


def check_length(tokens: Tensor, max_positions: int) -> None:
    if (length := tokens.shape[1]) > max_positions:
        raise ValueError(f"tokens must be at most {max_positions=} long, got {length}")


def check_cache_fits(num_bytes: int, batch_size: int, num_slots: int) -> None:
    check_memory(num_bytes, f"a cache of batch_size={batch_size} and num_slots={num_slots}")


def refuse_context(context: Tensor | None) -> None:
    if context is not None:
        raise ValueError("context must be None: this model has no cross-attention")


# Input of cross-attention: keys and values of each layer, (B or 1, kv_heads, M, head_dim) each
Text = list[tuple[Tensor, Tensor]]


class StaticKVCache:
    """Keys and values, a pair of (S, num_kv_heads, num_slots, D) buffers for each layer."""

    def __init__(
        self, config: ModelConfig, batch_size: int, num_slots: int, like: Tensor, text: Text | None
    ) -> None:
        shape = (batch_size, config.num_kv_heads, num_slots, config.head_dim)
        layers = range(config.num_layers)
        if like.is_cpu:
            size = 2 * len(layers) * math.prod(shape) * like.itemsize
            check_cache_fits(size, batch_size, num_slots)
        # zeros, as a masked slot with NaN would give 0 * NaN
        self.keys = [like.new_zeros(shape) for _ in layers]
        self.values = [like.new_zeros(shape) for _ in layers]
        self.text = text

    def text_of(self, first: int, count: int) -> Text | None:
        """Return the text of sequences, which may share one."""
        if self.text is None or len(self.text[0][0]) == 1:
            return self.text
        own = slice(first, first + count)
        return [(keys[own], values[own]) for keys, values in self.text]

    def put(
        self,
        layer: int,
        lanes: "Lanes",
        rotary: tuple[Tensor, Tensor] | None,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate and store; return rotated queries, and all visible keys and values."""
        of_keys, of_values = self.keys[layer], self.values[layer]
        if rotary is not None:
            queries, keys = rotate(queries, *rotary), rotate(keys, *rotary)
        write_rows(of_keys, lanes.rows, keys)
        write_rows(of_values, lanes.rows, values)
        own = slice(lanes.first, lanes.first + len(queries))
        return queries, of_keys[own, :, : lanes.num_slots], of_values[own, :, : lanes.num_slots]

    def renew(self, text: Text | None) -> bool:
        """Zero the buffers in place and copy a text; False if its shape has changed."""
        theirs, own = (list(itertools.chain(*(each or ()))) for each in (text, self.text))
        if [tensor.shape for tensor in theirs] != [tensor.shape for tensor in own]:
            return False
        for buffer, tensor in zip(own, theirs, strict=True):
            buffer.copy_(tensor)
        for buffer in (*self.keys, *self.values):
            buffer.zero_()
        return True


def rows_at(buffer: Tensor, slots: Tensor, first: int) -> Tensor:
    """Return the flat row indices of slots (S', L) in a buffer (S, heads, slots, D), rows of (D,).

    (S' * heads * L,) int64, for keys and values (S', heads, L, D).
    """
    heads, num_slots = buffer.shape[1:3]
    starts = torch.arange(first * heads, (first + len(slots)) * heads, device=slots.device)
    return (starts.view(-1, heads, 1) * num_slots + slots[:, None]).flatten()


def write_rows(buffer: Tensor, rows: Tensor, states: Tensor) -> None:
    """Write keys or values (S', heads, L, D) to the rows of a buffer given by `rows_at`."""
    size = states.shape[-1]
    buffer.view(-1, size).index_copy_(0, rows, states.reshape(-1, size).to(buffer.dtype))


# (queries, keys, values) -> (B, heads, L, D), like `attend` under some mask
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Lanes(NamedTuple):
    """Where a step's keys and values are written in a cache, and how much of it is read.

    It does not hold the cache: torch.compile keeps contents of records made while tracing.
    """

    rows: Tensor  # of its slots, as `rows_at`
    first: int  # first sequence
    num_slots: int  # number of slots read


def mask_in_parts(visible: Tensor, part: int = 256) -> Attend:
    """Split a mask (L, L) into groups of lanes, each up to the last lane that it sees.

    PyTorch also multiplies masked positions, which most of the later lanes are.
    """
    groups = (rows[:, : int(rows.any(0).nonzero().max()) + 1] for rows in visible.split(part))
    return partial(_attend_by_parts, groups=tuple(group.contiguous() for group in groups))


def _attend_by_parts(
    queries: Tensor, keys: Tensor, values: Tensor, groups: tuple[Tensor, ...]
) -> Tensor:
    parts = [
        attend(some, keys[:, :, : group.shape[1]], values[:, :, : group.shape[1]], group)
        for group, some in zip(groups, queries.split([*map(len, groups)], 2), strict=True)
    ]
    return torch.cat(parts, 2)


def attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, block_mask: BlockMask
) -> Tensor:
    """Attend by FlexAttention, which must be compiled to be fast."""
    grouped = queries.shape[1] > keys.shape[1]
    return flex_attention(queries, keys, values, block_mask=block_mask, enable_gqa=grouped)  # pyright: ignore[reportReturnType]


class GroupedQueries(nn.Module):
    def __init__(self, config: ModelConfig, kv_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.widths = width, kv_width, kv_width
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.k_proj = nn.Linear(kv_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(kv_size, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.q_norm = make_head_norm(config, config.num_heads)
        self.k_norm = make_head_norm(config, config.num_kv_heads)


class Attention(GroupedQueries):
    """Grouped-query self-attention, causal over its own tokens or masked over a cache."""

    mergeable: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, config.hidden_size)
        self.layer = layer
        self.qkv_proj: nn.Module | None = None  # query, key and value in one, after merge_linears

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        lanes: Lanes | None,
        cache: StaticKVCache | None,
    ) -> Tensor:
        """Attend from the lanes of x (B, L, hidden_size) to the cache, or else to x itself."""
        if self.qkv_proj is None:
            projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            projected = self.qkv_proj(x).split(self.widths, dim=-1)
        queries, keys, values = (split_heads(part, self.head_dim) for part in projected)
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        if cache is not None and lanes is not None:
            given = rotary, queries, keys, values
            queries, keys, values = cache.put(self.layer, lanes, *given)
        elif rotary is not None:
            queries, keys = rotate(queries, *rotary), rotate(keys, *rotary)
        return self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))


class CrossAttention(GroupedQueries):
    """Grouped-query attention from the sequence to a text, without positions (Cosmos V2W)."""

    def project(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, kv_heads, M, head_dim) of a text (B, M, context_size)."""
        keys = split_heads(self.k_proj(context), self.head_dim)
        return self.k_norm(keys), split_heads(self.v_proj(context), self.head_dim)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries = self.q_norm(split_heads(self.q_proj(x), self.head_dim))
        visible = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool, device=x.device)
        out = attend(queries, keys, values, visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, heads, L, head_dim)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax attention of (B, heads, L, D) queries over (B, kv_heads, M, D) keys and values.

    A mask (L, M) or (B, L, M) is true where a lane may attend; None means causal, and then L = M.
    Returns (B, heads, L, D).
    """
    num_heads, num_lanes = queries.shape[1:3]
    group = num_heads // keys.shape[1]
    if visible is None:
        given = queries, keys, values
        return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=group > 1)
    if visible.ndim == 3:
        visible = visible[:, None]
    if group == 1:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
    # fold heads that share a key head into lanes: keys are read once, and every kernel supports it
    folded = queries.unflatten(1, (-1, group)).flatten(2, 3)  # (B, kv_heads, group * L, D)
    mask = torch.cat([visible] * group, -2)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.unflatten(2, (group, num_lanes)).flatten(1, 2)
