"""WHAM's image tokenizer: frames of one size, by a ViT-VQGAN (see `vit_vqgan`).

It comes inside the main checkpoint (`wham_tokenizer_from_weights`); our own folder holds it as
`config.json`, with `"kind": "wham-vit-vqgan"` and the sizes, and `model.safetensors`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from diagd.data.video import resize
from diagd.families.wham.vit_vqgan import ViTVQGAN, ViTVQGANConfig, empty_vit_vqgan
from diagd.families.wham.weights import HEAD_SIZE, TOKENIZER_PREFIX
from diagd.tokenizers.frames import (
    BATCH_SIZE,
    check_batch_size,
    check_frames,
    check_tokens,
    paint,
)
from diagd.tokenizers.storage import (
    CONFIG_NAME,
    check_weights,
    read_config,
    read_tensors,
    require_file,
    save_files,
)

WHAM_KIND = "wham-vit-vqgan"
WEIGHTS_NAME = "model.safetensors"

_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, RGB in [0, 1]
_DEVIATION = (0.229, 0.224, 0.225)
_THEIR_NAMES = {
    "codebook.": "vq_vae._embedding.",
    ".input_proj.": ".proj1.",
    ".positions.": ".pos_embeds.",
    ".blocks.": ".vit.",
    ".attention_norm.": ".ln_1.",
    ".qkv_proj.": ".attn.c_attn.",
    ".o_proj.": ".attn.c_proj.",
    ".mlp_norm.": ".ln_2.",
    ".up_proj.": ".mlp.c_fc.",
    ".down_proj.": ".mlp.c_proj.",
    ".output_norm.": ".output_ln.",
}
_TRAINING_ONLY = ("patch_gan.", "target_patchgan.", "lpips_model.")


class WHAMTokenizer:
    """A frame-by-frame tokenizer for frames of one size.

    Results lie on the device of their input; the model may be elsewhere.
    """

    temporal_compression = 1
    fit_frames = staticmethod(resize)

    def __init__(self, model: ViTVQGAN, batch_size: int = BATCH_SIZE) -> None:
        """Wrap a model; `batch_size` frames are handled at once, which bounds the memory."""
        check_batch_size(batch_size)
        self.model = model.eval()
        self.batch_size = batch_size

    @property
    def codebook_size(self) -> int:
        return self.model.config.codebook_size

    @property
    def compression(self) -> int:
        return self.model.config.patch_size

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the pixels of a frame; only the model's own grid has a size.

        Raises:
            ValueError: another grid.
        """
        config = self.model.config
        if (height, width) != config.grid:
            rows, columns = config.grid
            raise ValueError(f"a frame must be {rows}x{columns} tokens, got {height}x{width}")
        return config.height_px, config.width_px

    def to(self, device: torch.device | str) -> Self:
        """Move the model; returns itself."""
        self.model.to(device)
        return self

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """Replace each patch by the id of the code of the closest direction (lowest id on ties).

        Args:
            frames: (T, height_px, width_px, 3) uint8 RGB.

        Returns:
            (T, height, width) int64.

        Raises:
            ValueError: no uint8 frames, or another size than the model's.
        """
        check_frames(frames, 1)
        size = frames.shape[1], frames.shape[2]
        expected = self.model.config.height_px, self.model.config.width_px
        if size != expected:
            raise ValueError(
                f"frames must be {expected[0]}x{expected[1]} px, got {size[0]}x{size[1]}"
            )
        chunks = []
        for chunk in frames.split(self.batch_size):
            values = chunk.to(self._device).movedim(-1, 1).float() / 255
            pictures = (values - self._channels(_MEAN)) / self._channels(_DEVIATION)
            chunks.append(self.model.nearest(self.model.latents(pictures)))
        return torch.cat(chunks).to(frames.device)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Paint the frames, rounding pixels down as WHAM's own code does.

        Args:
            tokens: (T, height, width) integers in [0, codebook_size), of the model's grid.

        Returns:
            (T, height_px, width_px, 3) uint8 RGB.

        Raises:
            ValueError: another shape or dtype, or ids outside the codebook.
        """
        check_tokens(tokens, self.codebook_size)
        self.frame_size_px(*tokens.shape[1:])
        chunks = []
        for chunk in tokens.split(self.batch_size):
            pictures = self.model.pixels(chunk.to(self._device, torch.int64))
            values = pictures * self._channels(_DEVIATION) + self._channels(_MEAN)
            chunks.append(paint(values * 255, "down"))
        return torch.cat(chunks).to(tokens.device)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config.json and model.safetensors, each under its name only when whole."""
        config = {"kind": WHAM_KIND} | asdict(self.model.config)
        save_files(folder, config, self.model.state_dict(), WEIGHTS_NAME, dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path, batch_size: int = BATCH_SIZE) -> "WHAMTokenizer":
        """Load what `save_pretrained` wrote.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is corrupt, of another kind, or does not fit the other.
        """
        config_path, weights_path = Path(folder) / CONFIG_NAME, Path(folder) / WEIGHTS_NAME
        values = read_config(config_path)
        kind = values.pop("kind", None)
        if kind != WHAM_KIND:
            raise ValueError(f"{config_path}: kind must be {WHAM_KIND}, got {kind!r}")
        require_file(weights_path)
        try:
            config = ViTVQGANConfig(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{config_path} describes no {WHAM_KIND}: {error}") from None
        model = empty_vit_vqgan(config)
        weights = read_tensors(weights_path)
        check_weights(weights_path, weights, model.state_dict())
        model.load_state_dict({n: w.float() for n, w in weights.items()}, assign=True)
        return cls(model, batch_size)

    @property
    def _device(self) -> torch.device:
        return self.model.codebook.weight.device

    def _channels(self, values: tuple[float, float, float]) -> Tensor:
        return torch.tensor(values, device=self._device).view(3, 1, 1)


def wham_tokenizer_from_weights(
    weights: Mapping[str, Tensor],
    height_px: int,
    width_px: int,
    head_size: int = HEAD_SIZE,
) -> WHAMTokenizer:
    """Take the tokenizer out of a WHAM checkpoint; sizes are read from the shapes.

    Args:
        weights: the state dict. What stands under `context_encoders.images.` is taken if anything
            does, else all there is.
        height_px, width_px: of the frames; a hyper-parameter of the checkpoint.
        head_size: width of an attention head; a hyper-parameter too.

    Raises:
        ValueError: weights are missing, unknown or of another shape (named), or the frames have
            another number of patches than the weights have positions.
    """
    where = "the WHAM tokenizer"
    found = {
        name.removeprefix(TOKENIZER_PREFIX): weight
        for name, weight in weights.items()
        if name.startswith(TOKENIZER_PREFIX)
    }
    found = {
        name: weight
        for name, weight in (found or weights).items()
        if not name.endswith(".attn_mask") and not name.startswith(_TRAINING_ONLY)
    }
    shapes = []
    for name in ("encoder.proj1.weight", "encoder.pos_embeds.weight", "vq_vae._embedding.weight"):
        if name not in found:
            raise ValueError(f"{where} misses weights: {name}")
        if found[name].dim() != 2:
            raise ValueError(f"{where}: {name} must be a matrix, got {tuple(found[name].shape)}")
        shapes.append(found[name].shape)
    (hidden_size, patch), (num_positions, _), (codebook_size, code_dim) = shapes
    config = ViTVQGANConfig(
        height_px,
        width_px,
        math.isqrt(patch // 3),
        hidden_size,
        len({name.split(".")[2] for name in found if name.startswith("encoder.vit.")}),
        head_size,
        code_dim,
        codebook_size,
    )
    rows, columns = config.grid
    if rows * columns != num_positions:
        raise ValueError(
            f"{where} has {num_positions} positions, but frames of {height_px}x{width_px} px have "
            f"{rows}x{columns} patches of {config.patch_size}x{config.patch_size} px"
        )
    model = empty_vit_vqgan(config)
    names = {name: _their_name(name) for name in model.state_dict()}
    expected = {names[name]: value for name, value in model.state_dict().items()}
    check_weights(where, found, expected, "its patches, positions and codebook")
    model.load_state_dict({n: found[theirs].float() for n, theirs in names.items()}, assign=True)
    return WHAMTokenizer(model)


def _their_name(name: str) -> str:
    for ours, theirs in _THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name
