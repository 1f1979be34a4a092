"""The video tokenizer of Cosmos: TorchScript networks about finite scalar quantisation.

A code is six numbers in [-1, 1], each one of a few levels, and the codebook is the grid of all
combinations, so an id is a mixed-radix number and nothing has to be looked up (arXiv:2309.15505;
the levels are those of Cosmos-Tokenize1-DV8x16x16): digit d of L levels is (d - L // 2) / (L // 2).
"""

import math
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from diagd.families.cosmos import presets
from diagd.families.cosmos.presets import LEVELS, WINDOW, WINDOW_GRIDS
from diagd.tokenizers import vq
from diagd.weight_files import load_torchscript

ENCODER_NAME, DECODER_NAME = "encoder.jit", "decoder.jit"


def codes_to_indices(codes: Tensor) -> Tensor:
    """Number the codes: (B, 6, ...) floating point -> (B, ...) int64 in [0, CODEBOOK_SIZE)."""
    ids = torch.zeros_like(codes[:, 0], dtype=torch.int64)
    basis = 1  # the first digit is lowest
    for values, levels in zip(codes.unbind(1), LEVELS, strict=True):
        half = levels // 2
        ids += (values.float() * half + half).round().to(torch.int64) * basis
        basis *= levels
    return ids


def fit_frames(frames: Tensor, height_px: int, width_px: int) -> Tensor:
    """Scale frames until they cover a size, and crop the centre, as Cosmos does, but rounded."""
    full_height, full_width = frames.shape[1:3]
    scale = max(width_px / full_width, height_px / full_height)
    size = math.ceil(scale * full_height), math.ceil(scale * full_width)
    top, left = round((size[0] - height_px) / 2), round((size[1] - width_px) / 2)
    chunks = []
    for chunk in frames.split(vq.BATCH_SIZE):
        pixels = chunk.movedim(-1, 1).float()
        if size != (full_height, full_width):
            pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
        cropped = pixels[:, :, top : top + height_px, left : left + width_px]
        chunks.append(vq.paint(cropped, "nearest"))
    return torch.cat(chunks)


class CosmosTokenizer:
    """A causal video tokenizer: 16 x 16 pixels a token, 8 frames a grid after the first.

    T frames <-> 1 + (T - 1) / 8 grids within a window; a longer clip is whole windows and then,
    perhaps, a part of one: 66 frames <-> 10 grids, 67 <-> 11.
    """

    codebook_size = presets.CODEBOOK_SIZE
    compression = presets.COMPRESSION
    temporal_compression = presets.TEMPORAL_COMPRESSION
    fit_frames = staticmethod(fit_frames)

    def __init__(self, encoder: Any, decoder: Any) -> None:
        # (1, 3, 33, H_px, W_px) in [-1, 1] -> (ids, codes), codes being (1, 6, 5, height, width)
        self.encoder = encoder
        self.decoder = decoder  # (1, 5, height, width) int64 -> (1, 3, 33, H_px, W_px)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @classmethod
    def from_jit(cls, folder: Path) -> Self:
        """Load the released files, which EXECUTES code in them: load what you trust."""
        names = ENCODER_NAME, DECODER_NAME
        return cls(*(load_torchscript(folder / name) for name in names)).to("cpu")

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"  # which pools no bfloat16
        self.dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
        self.encoder.to(self.device, self.dtype)
        self.decoder.to(self.device, self.dtype)
        return self

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        return height * self.compression, width * self.compression

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """(T, H_px, W_px, 3) uint8 RGB, sizes multiples of 16 -> (grids, height, width) int64."""
        rest = len(frames) % WINDOW
        if rest and (rest - 1) % self.temporal_compression:
            lengths = ", ".join(map(str, range(1, WINDOW, self.temporal_compression)))
            raise ValueError(
                f"a clip must have {lengths} or {WINDOW} frames, or whole windows of {WINDOW} "
                f"and then as many, got {len(frames)}"
            )
        windows = [self._encode_window(window) for window in frames.split(WINDOW)]
        return torch.cat(windows).to(frames.device)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """(grids, height, width) ids -> (T, H_px, W_px, 3) uint8, rounded down as NVIDIA does."""
        windows = [self._decode_window(window) for window in tokens.split(WINDOW_GRIDS)]
        return torch.cat(windows).to(tokens.device)

    def _encode_window(self, frames: Tensor) -> Tensor:
        values = vq.normalise(_filled(frames, WINDOW).to(self.device)).to(self.dtype)
        answer = self.encoder(values.movedim(0, 1)[None])
        height, width = (size // self.compression for size in frames.shape[1:3])
        expected = 1, len(LEVELS), WINDOW_GRIDS, height, width
        codes = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else answer
        if not isinstance(codes, Tensor) or codes.shape != expected:
            got = _describe(answer)
            raise ValueError(f"the encoder must return (ids, codes {expected}), got {got}")
        return codes_to_indices(codes)[0, : 1 + (len(frames) - 1) // self.temporal_compression]

    def _decode_window(self, tokens: Tensor) -> Tensor:
        ids = _filled(tokens, WINDOW_GRIDS).to(self.device, torch.int64)
        values = self.decoder(ids[None])
        expected = 1, 3, WINDOW, *self.frame_size_px(*tokens.shape[1:])
        if not isinstance(values, Tensor) or values.shape != expected:
            raise ValueError(f"the decoder must return {expected}, got {_describe(values)}")
        num_frames = 1 + (len(tokens) - 1) * self.temporal_compression
        levels = (values[0, :, :num_frames].float() * 0.5 + 0.5) * 255
        return vq.paint(levels.movedim(1, 0), "down")


def _filled(sequence: Tensor, length: int) -> Tensor:
    """Repeat the last member until there are `length`."""
    missing = length - len(sequence)
    return torch.cat([sequence, sequence[-1:].expand(missing, *sequence.shape[1:])])


def _describe(answer: object) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(_describe(member) for member in answer)})"
    return str(tuple(answer.shape)) if isinstance(answer, Tensor) else type(answer).__name__
