"""Rotary positions: one number, (row, column) or (frame, row, column).

In 2-D, keys and queries outside of rows (prefix and actions) are zero, as in LlamaGen.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from diagd.decoding.schedule import Section
from diagd.models.config import ModelConfig

_YARN_BETAS = 1, 4  # slow and fast, the values of the released Cosmos configs


def grid_coordinates(
    config: ModelConfig, positions: Tensor, sections: Sequence[Section] | None = None
) -> Tensor | None:
    """Return (3, ...) int64 frame, row, column of positions (...); None for a model without grid.

    Action tokens are at row -1 of the frame they precede, with their index as column; the prefix is
    at (0, 0, 0). In 2-D the first frame has actions too, at (-1, -1, -1) like the prefix. Frames
    are numbered through all sections, and each has its own rows and columns. For mrope see
    `shared_coordinates`; without sections all tokens are text.
    """
    if not config.on_grid:
        return None
    if config.position == "mrope":
        return shared_coordinates(positions, sections or ())
    is_2d, actions, num_before = config.position == "rope2d", config.num_action_tokens, 0
    if sections is None:
        sections = [Section(config.prefix_length - (0 if is_2d else actions), config.frame)]
    coordinates = positions.new_full((3, *positions.shape), -int(is_2d))
    for start, frame, count in sections:
        rest = (positions - start) % frame.one.slots_per_frame
        cell = rest - frame.num_action_tokens
        is_action = cell < 0
        row = torch.where(is_action, -1, cell // frame.width)
        column = torch.where(is_action, rest, cell % frame.width)
        number = num_before + (positions - start) // frame.one.slots_per_frame
        first = start if num_before else start + actions
        coordinates = torch.where(
            positions < first, coordinates, torch.stack([number, row, column])
        )
        num_before += count
    return coordinates


def shared_coordinates(positions: Tensor, sections: Sequence[Section]) -> Tensor:
    """Return (3, ...) int64 coordinates of positions (...), counted as in Qwen-VL.

    A text token is at (p, p, p), with p one above the token before it. The tokens of a frame share
    their first number p, to which their row and column are added; after it, p has grown by the
    longer side of the frame.
    """
    coordinates, saved = positions.expand(3, *positions.shape), 0
    for section in sections:
        start, frame, count = section
        size, side = frame.one.slots_per_frame, max(frame.height, frame.width)
        first = start - saved + (positions - start) // size * side
        cell = (positions - start) % size
        placed = torch.stack([first, first + cell // frame.width, first + cell % frame.width])
        saved += count * (size - side)
        behind = torch.where(positions < section.end, placed, positions - saved)
        coordinates = torch.where(positions < start, coordinates, behind)
    return coordinates


def rotary_frequencies(config: ModelConfig, size: int, original_extent: int) -> Tensor:
    """Return (size / 2,) float32: rope_step * theta^(-2i/size), stretched by YaRN if enabled."""
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    frequencies = config.rope_step * config.rope_theta**-exponents
    if config.yarn_factor == 1.0:
        return frequencies
    low, high = (2 * math.pi * beta / original_extent for beta in _YARN_BETAS)
    keep = ((frequencies - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - keep) / config.yarn_factor + keep)


def rotary_frequencies_3d(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return radians per frame, and radians per row or column."""
    space_dim = config.head_dim // 6 * 2
    time = rotary_frequencies(config, config.head_dim - 2 * space_dim, config.yarn_frames)
    return time, rotary_frequencies(config, space_dim, config.yarn_height)


class Waves(nn.Module):
    """Frequencies, and the coordinate that each one uses."""

    frequencies: Tensor  # (n,) float64, radians for each coordinate
    axes: Tensor  # (n,) int64, index of the coordinate: the position, or frame, row or column

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()
        axes = [torch.full((len(part),), axis, device="cpu") for axis, part in enumerate(parts)]
        # buffers, so that code that shards a model finds them
        self.register_buffer("frequencies", torch.cat(list(parts)).double(), persistent=False)
        self.register_buffer("axes", torch.cat(axes), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Waves":
        """Follow the model to its device, but not to its dtype."""
        device = fn(self.axes).device
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.to(device))
        return self


class Rotary(Waves):
    """Cosines and sines of coordinates, as exact after days of a stream as at its start."""

    def __init__(self, config: ModelConfig) -> None:
        parts = (rotary_frequencies(config, config.head_dim, 1),)
        if config.position == "rope3d":
            time, space = rotary_frequencies_3d(config)
            parts = time, space, space
        elif config.position == "rope2d":
            space = rotary_frequencies(config, config.head_dim // 2, 1)
            parts = torch.empty(0, device="cpu"), space, space
        elif config.position == "mrope":
            turning = rotary_frequencies(config, 2 * sum(config.rotary_sections), 1)
            frame, row, column = turning.split(config.rotary_sections)
            still = torch.zeros(config.head_dim // 2 - len(turning), device="cpu")
            parts = frame, row, torch.cat([column, still])
        super().__init__(parts)
        self.config = config

    def forward(
        self, positions: Tensor, coordinates: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (..., head_dim / 2) each, of coordinates (3, ...) int64.

        In 1-D, those of positions (...) int64.
        """
        if coordinates is None or self.config.position == "rope":
            coordinates = positions[None]
        coordinates = coordinates.movedim(0, -1)
        # within max_positions float32 products, as in training; whole multiples of it in float64
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
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PositionTable(Waves):
    """Sines and cosines of frame, row and column, added to the stream (Cosmos V2W), in bfloat16."""

    order: Tensor  # (hidden_size,) int64: sines, then cosines, coordinate by coordinate

    def __init__(self, config: ModelConfig) -> None:
        space_dim = config.hidden_size // 6 * 2
        counts = config.hidden_size // 2 - space_dim, space_dim // 2, space_dim // 2
        each = (torch.arange(count, device="cpu").double() / count for count in counts)
        super().__init__([10000.0**-exponents for exponents in each])
        self.prefix_length, pairs = config.prefix_length, torch.arange(len(self.axes), device="cpu")
        both = [torch.cat([part, part + len(pairs)]) for part in pairs.split(counts)]
        self.register_buffer("order", torch.cat(both), persistent=False)

    def forward(self, positions: Tensor, coordinates: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (..., hidden_size) of positions (...) at coordinates (3, ...), both int64."""
        angles = coordinates.movedim(0, -1)[..., self.axes] * self.frequencies
        rows = torch.cat([angles.sin(), angles.cos()], dim=-1)[..., self.order].bfloat16().to(dtype)
        return rows.masked_fill((positions < self.prefix_length)[..., None], 0)
