"""Small causal networks with the interface of Cosmos' discrete tokenizer, as TorchScript files."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagd.families.cosmos import LEVELS, codes_to_indices

PATCH = (8, 16, 16)  # frames, rows and columns of pixels per token
SLACK = 1e-3  # how far beyond the outermost levels the squashed numbers reach


def quantize(numbers: Tensor) -> Tensor:
    """Round to the nearest level, as Cosmos does: (B, 6, ...) unbounded -> codes in [-1, 1]."""
    codes = []
    for values, levels in zip(numbers.unbind(1), LEVELS, strict=True):
        reach = (levels - 1) * (1 + SLACK) / 2
        offset = 0.0 if levels % 2 else 0.5  # an even number of levels has none in the middle
        squashed = (values + math.atanh(offset / reach)).tanh() * reach - offset
        codes.append(squashed.round() / (levels // 2))
    return torch.stack(codes, dim=1)


def indices_to_codes(indices: Tensor) -> Tensor:
    """Look ids up: (B, ...) integers in [0, 64000) -> (B, 6, ...) float32 codes."""
    codes = []
    for levels in LEVELS:
        half = levels // 2
        codes.append((indices % levels - half).float() / half)
        indices = indices // levels
    return torch.stack(codes, dim=1)


class TinyEncoder(nn.Module):
    """Frames to (ids, codes, loss); the first frame stands for eight, as nothing is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(3, 8, PATCH, stride=PATCH)
        self.mix = nn.Conv3d(8, len(LEVELS), (2, 3, 3), padding=(0, 1, 1))
        with torch.no_grad():
            self.patches.weight *= 20
            self.mix.weight *= 4

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = frames[:, :, :1].expand(-1, -1, PATCH[0] - 1, -1, -1)
        states = self.patches(torch.cat([first, frames], dim=2))
        past = torch.cat([states[:, :, :1], states], dim=2)
        codes = quantize(self.mix(past))
        return codes_to_indices(codes).int(), codes, frames.sum()


class TinyDecoder(nn.Module):
    """Ids to frames; one grid gives eight frames, of the first grid only the last is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv3d(len(LEVELS), 8, (2, 3, 3), padding=(0, 1, 1))
        self.paint = nn.ConvTranspose3d(8, 3, PATCH, stride=PATCH)
        with torch.no_grad():
            self.paint.weight *= 8

    def forward(self, ids: Tensor) -> Tensor:
        codes = indices_to_codes(ids).type_as(self.paint.weight)
        past = torch.cat([codes[:, :, :1], codes], dim=2)
        painted = self.paint(functional.silu(self.mix(past)))
        return painted[:, :, PATCH[0] - 1 :]


def write_scripts(folder: Path) -> Path:
    """Trace both networks, as the released ones were, on a size of their own."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    frames = torch.rand(1, 3, 17, 32, 16)
    ids = torch.zeros(1, 3, 2, 1, dtype=torch.int64)
    for name, network, example in (
        ("encoder.jit", TinyEncoder(), frames),
        ("decoder.jit", TinyDecoder(), ids),
    ):
        with warnings.catch_warnings():  # TorchScript is deprecated, but what Cosmos came as
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            script: Any = torch.jit.trace(network.eval(), example)  # annotated loosely
            script.save(str(folder / name))
    return folder
