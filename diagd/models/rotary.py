"""Rotary positions: one number, (row, column) or (frame, row, column).

In 2-D, keys and queries of what stands in no row (prefix and actions) are zero, as in LlamaGen.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from diagd.models.config import ModelConfig
from diagd.system import check_memory

_YARN_BETAS = 1, 4  # slow and fast, the values of the released Cosmos configs


def grid_coordinates(config: ModelConfig, positions: Tensor) -> Tensor:
    """Return (..., 3) int64 (frame, row, column) of positions (...); (0, 0, 0) of the prefix.

    Action tokens are at row -1 of the frame they precede, their index being the column. In 2-D the
    first frame has actions, too, which are at (-1, -1, -1) as the prefix is.
    """
    actions, width = config.num_action_tokens, config.grid_width
    first, is_2d = first_grid_token(config), config.position == "rope2d"
    q = positions + actions - first  # as if the first frame had actions in any case
    frame, rest = q // (actions + config.tokens_per_frame), q % (actions + config.tokens_per_frame)
    cell = rest - actions
    is_action = cell < 0
    row = torch.where(is_action, -1, cell // width)
    column = torch.where(is_action, rest, cell % width)
    coordinates = torch.stack([frame, row, column], dim=-1)
    return torch.where((positions < first)[..., None], -int(is_2d), coordinates)


def first_grid_token(config: ModelConfig) -> int:
    actions = config.num_action_tokens if config.position == "rope2d" else 0
    return config.prefix_length + actions


def rotary_frequencies(config: ModelConfig, size: int, original_extent: int) -> Tensor:
    """Return (size / 2,) float32: rope_step * theta^(-2i/size), stretched by YaRN if asked for."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = config.rope_step * config.rope_theta**-exponents
    if config.yarn_factor == 1.0:
        return frequencies
    low, high = (2 * math.pi * beta / original_extent for beta in _YARN_BETAS)
    keep = ((frequencies - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - keep) / config.yarn_factor + keep)


def rotary_frequencies_3d(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return radians a frame, and radians a row or column."""
    space_dim = config.head_dim // 6 * 2
    time = rotary_frequencies(config, config.head_dim - 2 * space_dim, config.yarn_frames)
    return time, rotary_frequencies(config, space_dim, config.yarn_height)


class Rotary(nn.Module):
    """Cosines and sines of positions, as exact after days of a stream as at its start."""

    frequencies: Tensor  # (head_dim / 2,) float64, radians a pair turns for each coordinate
    axes: Tensor  # (head_dim / 2,) int64, which coordinate: the position, or frame, row or column

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        parts = (rotary_frequencies(config, config.head_dim, 1),)
        if config.position == "rope3d":
            time, space = rotary_frequencies_3d(config)
            parts = time, space, space
        elif config.position == "rope2d":
            space = rotary_frequencies(config, config.head_dim // 2, 1)
            parts = torch.empty(0, device="cpu"), space, space
        axes = [torch.full((len(part),), axis, device="cpu") for axis, part in enumerate(parts)]
        # buffers, so that whoever shards a model over devices finds them as well
        self.register_buffer("frequencies", torch.cat(parts).double(), persistent=False)
        self.register_buffer("axes", torch.cat(axes), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Follow the model to its device, but not to its dtype."""
        device = fn(self.axes).device
        self.axes, self.frequencies = self.axes.to(device), self.frequencies.to(device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions (...), each (..., head_dim / 2)."""
        coordinates = positions[..., None]
        if self.config.position in ("rope2d", "rope3d"):
            coordinates = grid_coordinates(self.config, positions)
        # within max_positions float32 products, as in training; what whole multiples add in float64
        length = self.config.max_positions
        times = torch.div(coordinates, length, rounding_mode="trunc")
        within = (coordinates - times * length)[..., self.axes].float() * self.frequencies.float()
        angles = (times * length)[..., self.axes] * self.frequencies + within
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if self.config.position == "rope2d":
            placed = coordinates[..., 1:2] >= 0  # in a row
            cos, sin = cos * placed, sin * placed
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, heads, L, D) by angles ([B,] L, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (of if of.ndim == 2 else of[:, None] for of in (cos.to(x.dtype), sin.to(x.dtype)))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PositionTable(nn.Module):
    """Sines and cosines of frame, row and column, added to the stream (Cosmos V2W), in bfloat16."""

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_memory(
            18 * config.hidden_size * config.max_positions,  # waves in float64, and the rest
            f"the position table of max_positions={config.max_positions}",
        )
        space_dim = config.hidden_size // 6 * 2
        sizes = config.hidden_size - 2 * space_dim, space_dim, space_dim
        positions = torch.arange(config.max_positions, device="cpu")
        coordinates = grid_coordinates(config, positions).double().unbind(-1)
        waves = []
        for places, size in zip(coordinates, sizes, strict=True):
            exponents = torch.arange(size // 2, device="cpu").double() / (size / 2)
            angles = torch.outer(places, 10000.0**-exponents)
            waves += [angles.sin(), angles.cos()]
        table = torch.cat(waves, dim=-1).bfloat16()
        table[: config.prefix_length] = 0
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table[positions].to(dtype)
