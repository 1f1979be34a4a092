"""Frames to tokens and back: the protocol the pipeline needs, and VQ tokenizers of diffusers.

`VQTokenizer` wraps a diffusers `VQModel` and keeps its files: `config.json` and
`diffusion_pytorch_model.safetensors` (float16 on disk unless asked otherwise, float32 in memory).
A model of `3 * p * p` channels reads frames folded into p x p patches (`pixel_unshuffle`) and
writes patches: no feature map is ever as large as the frame, which on a CPU is most of the cost.
"""

import json
import math
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from diagd.data.video import resize
from diagd.tokenizers.frames import (
    BATCH_SIZE,
    PixelRounding,
    check_batch_size,
    check_frames,
    check_rounding,
    check_tokens,
    normalise,
    paint,
)
from diagd.tokenizers.storage import (
    CONFIG_NAME,
    read_config,
    read_tensors,
    require_file,
    save_files,
)
from diagd.tokenizers.vq_models import (
    load_vq_model,
    memory_format,
)

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"

_ROUNDING_KEY = "pixel_rounding"  # ours, in diffusers' config.json; absent where it is the default
_ROUNDING: PixelRounding = "nearest"


class VideoTokenizer(Protocol):
    """What the pipeline asks of a tokenizer: grids of ids for frames, and frames back.

    T frames <-> 1 + (T - 1) / temporal_compression grids.

    Attributes:
        codebook_size: ids lie in [0, codebook_size).
        compression: pixels per token, along height and along width.
        temporal_compression: frames per grid after the first.
    """

    @property
    def codebook_size(self) -> int: ...

    @property
    def compression(self) -> int: ...

    @property
    def temporal_compression(self) -> int: ...

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the pixels of a frame of height x width tokens: (H_px, W_px)."""
        ...

    def fit_frames(self, frames: Tensor, height_px: int, width_px: int) -> Tensor:
        """Crop and scale (T, H_px, W_px, 3) uint8 RGB to a size, as the model's makers do."""
        ...

    def encode(self, frames: Tensor) -> Tensor:
        """(T, H_px, W_px, 3) uint8 RGB -> (grids, height, width) int64."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """(grids, height, width) integer -> (T, H_px, W_px, 3) uint8 RGB."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """Move the model, and return itself; results lie on the device of their input."""
        ...


class VQTokenizer:
    """A frame-by-frame tokenizer with a learned codebook.

    Attributes:
        painting: type of the products of `decode`, float32 or bfloat16; models that paint pixels
            rather than patches keep to float32. bfloat16 moves a level of the bundled world by 2 of
            255 at most.
    """

    temporal_compression = 1
    painting = torch.float32
    fit_frames = staticmethod(resize)

    def __init__(
        self,
        model: Any,
        batch_size: int = BATCH_SIZE,
        pixel_rounding: PixelRounding = _ROUNDING,
    ) -> None:
        """Wrap a model.

        Args:
            model: a diffusers VQModel of 3 * p * p input and output channels.
            batch_size: frames encoded or decoded at once; bounds the memory.
            pixel_rounding: how pixels become whole numbers (see `paint`); kept in config.json.
        """
        channels, painted = model.config["in_channels"], model.config["out_channels"]
        self.patch_size = math.isqrt(max(channels, 0) // 3)
        if not self.patch_size or 3 * self.patch_size**2 != channels:
            raise ValueError(f"in_channels must be 3 * p * p (3, 12, 27, 48), got {channels}")
        if painted != channels:
            raise ValueError(f"out_channels must equal in_channels={channels}, got {painted}")
        check_batch_size(batch_size)
        check_rounding(pixel_rounding)
        self.model: Any = model.eval()  # diffusers annotates its methods wrongly
        self.batch_size = batch_size
        self.pixel_rounding: PixelRounding = pixel_rounding

    @property
    def codebook_size(self) -> int:
        return self.codebook.shape[0]

    @property
    def compression(self) -> int:
        return self.patch_size * 2 ** (len(self.model.config.block_out_channels) - 1)

    @property
    def codebook(self) -> Tensor:
        """The code vectors, (codebook_size, C) float32."""
        return self.model.quantize.embedding.weight

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the pixels of a frame of height x width tokens: (H_px, W_px)."""
        return height * self.compression, width * self.compression

    def to(self, device: torch.device | str) -> Self:
        """Move the model; returns itself."""
        self.model.to(device)
        return self

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """Replace each patch by the id of its nearest code (the lowest id on ties).

        Args:
            frames: (T, H_px, W_px, 3) uint8 RGB, sizes multiples of `compression`.

        Returns:
            (T, height, width) int64.

        Raises:
            ValueError: no uint8 frames, or a size that is no multiple of `compression`.
        """
        check_frames(frames, self.compression)
        device = self.codebook.device
        chunks = [
            self.nearest(self.latents(chunk.to(device))) for chunk in frames.split(self.batch_size)
        ]
        return torch.cat(chunks).to(frames.device)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Paint the frames.

        Args:
            tokens: (T, height, width) integers in [0, codebook_size).

        Returns:
            (T, H_px, W_px, 3) uint8 RGB.

        Raises:
            ValueError: another shape or dtype, or ids outside the codebook.
        """
        check_tokens(tokens, self.codebook_size)
        chunks, device = [], self.codebook.device
        fast = self.painting == torch.bfloat16 and self.model.config.in_channels > 3
        for chunk in tokens.split(self.batch_size):
            codes = self.codebook[chunk.to(device, torch.int64)]  # (T, h, w, C)
            with torch.autocast(device.type, torch.bfloat16, enabled=fast):
                values = self.pixels(codes.movedim(-1, 1)).float()
            chunks.append(paint((values + 1) * 127.5, self.pixel_rounding))
        return torch.cat(chunks).to(tokens.device)

    def latents(self, frames: Tensor) -> Tensor:
        """Encode without rounding to codes, differentiably: uint8 frames -> (T, C, h, w)."""
        folded = functional.pixel_unshuffle(normalise(frames), self.patch_size)
        folded = folded.contiguous(memory_format=memory_format(self.model))
        return self.model.encode(folded).latents

    def nearest(self, latents: Tensor) -> Tensor:
        """Find the closest codes: (T, C, h, w) -> (T, h, w) int64."""
        vectors = latents.movedim(1, -1).float()
        half_norms = self.codebook.square().sum(dim=1) / 2
        distances = half_norms - vectors.flatten(0, -2) @ self.codebook.T  # half the squared ones
        return distances.argmin(dim=-1).unflatten(0, vectors.shape[:-1])

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode code vectors, differentiably: (T, C, h, w) -> (T, 3, H_px, W_px) about [-1, 1]."""
        codes = codes.contiguous(memory_format=memory_format(self.model))
        spatial = codes if self.model.config.norm_type == "spatial" else None
        folded = self.model.decoder(self.model.post_quant_conv(codes), spatial)
        return functional.pixel_shuffle(folded, self.patch_size)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write diffusers' two files, each under its name only when whole.

        Args:
            dtype: of the weights on disk; float32 keeps every bit of them.
        """
        config = json.loads(self.model.to_json_string())
        if self.pixel_rounding != _ROUNDING:
            config[_ROUNDING_KEY] = self.pixel_rounding
        save_files(folder, config, self.model.state_dict(), WEIGHTS_NAME, dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path, batch_size: int = BATCH_SIZE) -> "VQTokenizer":
        """Load a tokenizer that diffusers or `save_pretrained` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is corrupt, no VQModel, or does not fit the other.
        """
        config_path, weights_path = Path(folder) / CONFIG_NAME, Path(folder) / WEIGHTS_NAME
        config = read_config(config_path)
        rounding = config.pop(_ROUNDING_KEY, _ROUNDING)
        require_file(weights_path)
        model = load_vq_model(config, config_path, read_tensors(weights_path), weights_path)
        return cls(model, batch_size, rounding)
