"""Rotary positions: one number, or (frame, row, column); pairs (i, i + D / 2) as in LLaMA."""

import math

import torch
from torch import Tensor, nn

from diagd.memory import check_memory
from diagd.models.config import ModelConfig

_YARN_BETA_FAST, _YARN_BETA_SLOW = 4, 1  # the values of the released Cosmos configs


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


def _check_table(config: ModelConfig, name: str, bytes_a_position: int) -> None:
    """Raise ValueError where a table of all positions would never fit the memory."""
    table = f"the {name} table of max_positions={config.max_positions}"
    check_memory(config.max_positions * bytes_a_position, table)


class RotaryTable(nn.Module):
    """Cosines and sines of every position; real even while the weights are on the meta device."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        _check_table(config, "rotary", 6 * config.head_dim)  # angles, their parts and the two
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


class PositionTable(nn.Module):
    """Sines and cosines of frame, row and column, added to the residual stream (Cosmos V2W).

    An axis takes the D features [sin(p * w) | cos(p * w)], w_k = 10000^(-k / (D / 2)); frame, row
    and column stand side by side. Rounded to bfloat16 whatever the model's type; a prefix gets 0.
    """

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        _check_table(config, "position", 18 * config.hidden_size)  # waves in float64, and the rest
        space_dim = config.hidden_size // 6 * 2
        sizes = config.hidden_size - 2 * space_dim, space_dim, space_dim
        coordinates = grid_coordinates(config).double().unbind(-1)
        waves = []
        for places, size in zip(coordinates, sizes, strict=True):
            exponents = torch.arange(size // 2, device="cpu").double() / (size / 2)
            angles = torch.outer(places, 10000.0**-exponents)
            waves += [angles.sin(), angles.cos()]
        table = torch.cat(waves, dim=-1).bfloat16()
        table[: config.prefix_length] = 0
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the rows of positions (L,) as (L, hidden_size)."""
        return self.table[positions].to(dtype)
