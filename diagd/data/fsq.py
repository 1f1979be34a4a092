"""Finite scalar quantisation: a code is six numbers, each rounded to one of a few levels.

The codebook is the grid of all combinations, so an id is a mixed-radix number and nothing has to be
looked up (arXiv:2309.15505; the levels are those of Cosmos-Tokenize1-DV8x16x16). Codes lie on
dimension 1, in [-1, 1]: digit d of a dimension of L levels is the code (d - L // 2) / (L // 2).
"""

import math

import torch
from torch import Tensor

LEVELS = (8, 8, 8, 5, 5, 5)
CODEBOOK_SIZE = math.prod(LEVELS)  # 64000

_BASIS = [math.prod(LEVELS[:number]) for number in range(len(LEVELS))]  # the first digit is lowest
_SLACK = 1e-3  # how far beyond the outermost level the squashed numbers reach


def quantize(numbers: Tensor) -> Tensor:
    """Squash every number into the range of its levels and round it to the nearest one.

    Args:
        numbers: (B, 6, ...) floating point, unbounded.

    Returns:
        Codes of the same shape and dtype, in [-1, 1].
    """
    values = numbers.movedim(1, -1)
    levels = torch.tensor(LEVELS, dtype=values.dtype, device=values.device)
    reach = (levels - 1) * (1 + _SLACK) / 2
    offset = torch.where(levels % 2 == 0, 0.5, 0.0).to(values.dtype)  # an even count has no middle
    squashed = (values + (offset / reach).atanh()).tanh() * reach - offset
    return (squashed.round() / _half_levels(values)).movedim(-1, 1)


def codes_to_indices(codes: Tensor) -> Tensor:
    """Number the codes: (B, 6, ...) floating point -> (B, ...) int64 in [0, CODEBOOK_SIZE)."""
    values = codes.movedim(1, -1).float()
    half = _half_levels(values)
    digits = (values * half + half).round().to(torch.int64)
    return (digits * torch.tensor(_BASIS, device=codes.device)).sum(dim=-1)


def indices_to_codes(indices: Tensor) -> Tensor:
    """Look ids up: (B, ...) integers in [0, CODEBOOK_SIZE) -> (B, 6, ...) float32 codes."""
    basis = torch.tensor(_BASIS, device=indices.device)
    levels = torch.tensor(LEVELS, device=indices.device)
    digits = (indices[..., None] // basis % levels).float()
    half = _half_levels(digits)
    return ((digits - half) / half).movedim(-1, 1)


def _half_levels(like: Tensor) -> Tensor:
    return like.new_tensor([level // 2 for level in LEVELS])
