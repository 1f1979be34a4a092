"""Finite scalar quantisation: a code is six numbers, each rounded to one of a few levels.

The codebook is the grid of all combinations, so an id is a mixed-radix number and nothing has to be
looked up (arXiv:2309.15505; the levels are those of Cosmos-Tokenize1-DV8x16x16). Codes lie on
dimension 1, in [-1, 1]: digit d of a dimension of L levels is the code (d - L // 2) / (L // 2).
"""

import math

import torch
from torch import Tensor

from diagd.families.cosmos.presets import LEVELS

_BASIS = [math.prod(LEVELS[:number]) for number in range(len(LEVELS))]  # the first digit is lowest
_SLACK = 1e-3  # how far beyond the outermost levels the squashed numbers reach


def quantize(numbers: Tensor) -> Tensor:
    """Squash every number into the range of its levels and round it to the nearest one.

    Args:
        numbers: (B, 6, ...) floating point, unbounded.

    Returns:
        Codes of the same shape and dtype, in [-1, 1].
    """
    codes = []
    for values, levels in zip(numbers.unbind(1), LEVELS, strict=True):
        reach = (levels - 1) * (1 + _SLACK) / 2
        offset = 0.0 if levels % 2 else 0.5  # an even number of levels has none in the middle
        squashed = (values + math.atanh(offset / reach)).tanh() * reach - offset
        codes.append(squashed.round() / (levels // 2))
    return torch.stack(codes, dim=1)


def codes_to_indices(codes: Tensor) -> Tensor:
    """Number the codes: (B, 6, ...) floating point -> (B, ...) int64 in [0, CODEBOOK_SIZE)."""
    ids = torch.zeros_like(codes[:, 0], dtype=torch.int64)
    for values, levels, basis in zip(codes.unbind(1), LEVELS, _BASIS, strict=True):
        half = levels // 2
        ids += (values.float() * half + half).round().to(torch.int64) * basis
    return ids
