"""Layers of the decoder: norms, rotary tables, attention over given keys, MLPs.

Module names are LLaMA's, so a Hugging Face LLaMA state dict loads untranslated. Attention takes a
mask over cache slots and knows neither what a slot stands for nor in which order slots are written.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagd.models.cache import StaticKVCache
from diagd.models.config import ModelConfig

_YARN_BETA_FAST, _YARN_BETA_SLOW = 4, 1  # the values of the released Cosmos configs


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


def grid_coordinates(config: ModelConfig) -> Tensor:
    """Return (max_positions, 3) int64 (frame, row, column) of every position of the 1-D sequence.

    With n action tokens a frame, q = position + n - prefix_length counts from the place where the
    first frame's own actions would stand. An action token is at row -1 of the frame it precedes,
    its index being the column. Positions of the prefix get (0, 0, 0): zero angles.
    """
    actions, width = config.num_action_tokens, config.grid_width
    q = torch.arange(config.max_positions, device="cpu") + actions - config.prefix_length
    frame, rest = q // (actions + config.tokens_per_frame), q % (actions + config.tokens_per_frame)
    cell = rest - actions
    is_action = cell < 0
    row = torch.where(is_action, -1, cell // width)
    column = torch.where(is_action, rest, cell % width)
    coordinates = torch.stack([frame, row, column], dim=-1)
    coordinates[: config.prefix_length] = 0
    return coordinates


def rotary_frequencies(config: ModelConfig, size: int, original_extent: int) -> Tensor:
    """Return (size / 2,) float32: rope_step * theta^(-2i/size), stretched by YaRN if asked for."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = config.rope_step * config.rope_theta**-exponents
    if config.yarn_factor == 1.0:
        return frequencies
    high = 2 * math.pi * _YARN_BETA_FAST / original_extent
    low = 2 * math.pi * _YARN_BETA_SLOW / original_extent
    keep = ((frequencies - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - keep) / config.yarn_factor + keep)


def rotary_frequencies_3d(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return radians a frame, and radians a row or column, of the planes that belong to each."""
    space_dim = config.head_dim // 6 * 2
    time = rotary_frequencies(config, config.head_dim - 2 * space_dim, config.yarn_frames)
    return time, rotary_frequencies(config, space_dim, config.yarn_height)


def rotary_angles(config: ModelConfig) -> Tensor:
    """Return (max_positions, head_dim / 2) float32 angles; 3-D ones are [frame | row | column]."""
    if config.position == "rope":
        positions = torch.arange(config.max_positions, device="cpu").float()
        return torch.outer(positions, rotary_frequencies(config, config.head_dim, 1))
    time, space = rotary_frequencies_3d(config)
    frame, row, column = grid_coordinates(config).float().unbind(-1)
    return torch.cat(
        [torch.outer(frame, time), torch.outer(row, space), torch.outer(column, space)], dim=-1
    )


class RotaryTable(nn.Module):
    """Cosines and sines of every position; real even while the weights are on the meta device."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        angles = rotary_angles(config)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gather the rows of positions (L,) as two (L, head_dim / 2) tensors."""
        return self.cos[positions].to(dtype), self.sin[positions].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, heads, L, D) by angles given as (L, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query self-attention, causal over its own tokens or masked over a cache."""

    mergeable = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.layer, self.head_dim = layer, config.head_dim
        self.widths = width, kv_width, kv_width
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.qkv_proj: nn.Module | None = None  # all three, after merge_linears
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
        visible: Tensor | None,
        cache: StaticKVCache | None,
    ) -> Tensor:
        """Attend from every lane of x.

        Args:
            x: (B, L, hidden_size).
            rotary: Cosines and sines, each (L, head_dim / 2); None rotates nothing.
            slots: (L,) int64, where the cache takes this call's keys and values.
            visible: (L, M) bool, True = may attend; M counts cache slots, or is L without a cache.
                None means causal.
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
        if cache is not None and slots is not None and visible is not None:
            cache.write(self.layer, slots, keys, values)
            keys, values = cache.read(self.layer, visible.shape[1])
        return self.o_proj(attend(queries, keys, values, visible).transpose(1, 2).flatten(2))


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax attention of (B, heads, L, D) queries over (B, kv_heads, M, D) keys and values.

    With a mask, the query heads that share a key head become more lanes of that head: keys and
    values are then read once and never repeated, and every SDPA kernel takes it.

    Args:
        queries: (B, heads, L, D).
        keys: (B, kv_heads, M, D); kv_heads divides heads.
        values: (B, kv_heads, M, D).
        visible: (L, M) bool, True = may attend; None means causal, and then L = M.

    Returns:
        (B, heads, L, D).
    """
    num_heads, num_lanes = queries.shape[1:3]
    group = num_heads // keys.shape[1]
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

    mergeable = {"gate_up_proj": ("gate_proj", "up_proj")}

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
        visible: Tensor | None,
        cache: StaticKVCache | None,
    ) -> Tensor:
        """Add attention and MLP to the residual stream x; arguments as in `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, slots, visible, cache)
        return x + self.mlp(self.post_attention_layernorm(x))
