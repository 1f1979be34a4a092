"""Frames to tokens and back: the protocol the pipeline needs, and VQ tokenizers of diffusers.

`VQTokenizer` wraps a diffusers `VQModel` and keeps its files: `config.json` and
`diffusion_pytorch_model.safetensors` (float16 on disk, float32 in memory). A model of
`3 * p * p` channels reads frames folded into p x p patches (`pixel_unshuffle`) and writes patches:
no feature map is ever as large as the frame, which on a CPU is most of the cost.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"


class VideoTokenizer(Protocol):
    """What the pipeline asks of a tokenizer: one grid of ids a frame, and frames back.

    Attributes:
        codebook_size: ids lie in [0, codebook_size).
        compression: pixels per token, along height and along width.
    """

    @property
    def codebook_size(self) -> int: ...

    @property
    def compression(self) -> int: ...

    def encode(self, frames: Tensor) -> Tensor:
        """(T, H_px, W_px, 3) uint8 RGB -> (T, height, width) int64."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """(T, height, width) integer -> (T, H_px, W_px, 3) uint8 RGB."""
        ...


class VQTokenizer:
    """A frame-by-frame tokenizer with a learned codebook.

    Results lie on the device of their input; the model may be elsewhere.
    """

    def __init__(self, model: VQModel, batch_size: int = 8) -> None:
        """Wrap a model.

        Args:
            model: a diffusers VQModel of 3 * p * p input and output channels.
            batch_size: frames encoded or decoded at once; bounds the memory.
        """
        channels = model.config["in_channels"]
        self.patch_size = math.isqrt(max(channels, 0) // 3)
        if not self.patch_size or 3 * self.patch_size**2 != channels:
            raise ValueError(f"in_channels must be 3 * p * p (3, 12, 27, 48), got {channels}")
        painted = model.config["out_channels"]
        if painted != channels:
            raise ValueError(f"out_channels must equal in_channels={channels}, got {painted}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model: Any = model.eval()  # diffusers annotates its methods wrongly
        self.batch_size = batch_size

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

    def to(self, device: torch.device | str) -> "VQTokenizer":
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
        self.check_frames(frames)
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
        if tokens.dim() != 3 or not tokens.numel():
            raise ValueError(f"tokens must be (T, height, width), got {tuple(tokens.shape)}")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.codebook_size:
            raise ValueError(
                f"tokens must be in [0, codebook_size={self.codebook_size}), got {low} to {high}"
            )
        chunks = []
        for chunk in tokens.split(self.batch_size):
            codes = self.codebook[chunk.to(self.codebook.device, torch.int64)]  # (T, h, w, C)
            values = (self.pixels(codes.movedim(-1, 1)) + 1) * 127.5
            chunks.append(values.round().clamp(0, 255).to(torch.uint8).movedim(1, -1))
        return torch.cat(chunks).contiguous().to(tokens.device)

    def latents(self, frames: Tensor) -> Tensor:
        """Encode without rounding to codes, differentiably: uint8 frames -> (T, C, h, w)."""
        values = normalise(frames)
        folded = functional.pixel_unshuffle(values, self.patch_size)
        return self.model.encode(folded.contiguous(memory_format=torch.channels_last)).latents

    def nearest(self, latents: Tensor) -> Tensor:
        """Find the closest codes: (T, C, h, w) -> (T, h, w) int64."""
        vectors = latents.movedim(1, -1).float()
        half_norms = self.codebook.square().sum(dim=1) / 2
        distances = half_norms - vectors.flatten(0, -2) @ self.codebook.T  # half the squared ones
        return distances.argmin(dim=-1).unflatten(0, vectors.shape[:-1])

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode code vectors, differentiably: (T, C, h, w) -> (T, 3, H_px, W_px) about [-1, 1]."""
        folded = self.model.decode(codes, force_not_quantize=True).sample
        return functional.pixel_shuffle(folded, self.patch_size)

    def check_frames(self, frames: Tensor) -> None:
        """Raise ValueError unless frames are (T, H_px, W_px, 3) uint8 of fitting sizes."""
        check_frames(frames, self.compression)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write diffusers' two files; the weights in float16, under their name only when whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_config(folder)
        weights = {
            name: value.detach().to("cpu", torch.float16).contiguous()
            for name, value in self.model.state_dict().items()
        }
        partial = folder / f".{WEIGHTS_NAME}.partial"
        save_file(weights, partial, metadata={"format": "pt"})
        os.replace(partial, folder / WEIGHTS_NAME)

    @classmethod
    def from_pretrained(cls, folder: str | Path, batch_size: int = 8) -> "VQTokenizer":
        """Load a tokenizer that diffusers or `save_pretrained` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is corrupt, no VQModel, or does not fit the other.
        """
        folder = Path(folder)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"tokenizer file not found: {folder / name}")
        model = _build(folder / CONFIG_NAME)
        path = folder / WEIGHTS_NAME
        try:
            weights = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file (corrupt?): {error}") from None
        _check_weights(path, {name: value.shape for name, value in weights.items()}, model)
        model.load_state_dict({name: value.float() for name, value in weights.items()})
        return cls(model.to(memory_format=torch.channels_last), batch_size)


def check_frames(frames: Tensor, compression: int) -> None:
    """Raise ValueError unless frames are (T, H_px, W_px, 3) uint8 of multiples of `compression`."""
    if frames.dim() != 4 or frames.shape[-1] != 3 or not frames.numel():
        raise ValueError(f"frames must be (T, H_px, W_px, 3), got {tuple(frames.shape)}")
    if frames.dtype != torch.uint8:
        raise ValueError(f"frames must be uint8, got {frames.dtype}")
    height_px, width_px = frames.shape[1:3]
    if height_px % compression or width_px % compression:
        raise ValueError(
            f"frame height and width must be multiples of {compression} px, "
            f"got {height_px}x{width_px}"
        )


def normalise(frames: Tensor) -> Tensor:
    """Scale to what the models see: (T, H_px, W_px, 3) uint8 -> (T, 3, H_px, W_px) in [-1, 1]."""
    return frames.movedim(-1, 1).float() / 127.5 - 1


def _build(path: Path) -> Any:
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind != "VQModel":
        raise ValueError(f"{path}: _class_name must be VQModel, got {kind!r}")
    try:
        return VQModel.from_config(config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no VQModel: {str(error).splitlines()[0]}") from None


def _check_weights(path: Path, shapes: dict[str, torch.Size], model: Any) -> None:
    expected = {name: value.shape for name, value in model.state_dict().items()}
    for problem, names in (
        ("misses weights", sorted(expected.keys() - shapes.keys())),
        ("holds unknown weights", sorted(shapes.keys() - expected.keys())),
    ):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise ValueError(f"{path} {problem} (does it fit {CONFIG_NAME}?): {listed}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{path}: {name} must be {tuple(shape)} as {CONFIG_NAME} says, "
                f"got {tuple(shapes[name])}"
            )
