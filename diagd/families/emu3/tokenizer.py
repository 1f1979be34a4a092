"""The image tokenizer of Emu3: the VQ model of transformers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.files import read_json_object
from diagd.tokenizers.vq import CONFIG_NAME, WEIGHTS_NAME, FrameTokenizer, normalise, paint
from diagd.weight_files import assign_weights, check_fit, read_tensors

KIND = "emu3_vqgan"


class Emu3Tokenizer(FrameTokenizer):
    """Images one by one."""

    batch_size = 1  # a frame of 720 px has 133 million activations at its widest

    @property
    def codebook_size(self) -> int:
        return self.model.config.codebook_size

    @property
    def compression(self) -> int:
        return self.model.spatial_scale_factor

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        return height * self.compression, width * self.compression

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        return self.in_batches(self._encode, frames)

    def _encode(self, frames: Tensor) -> Tensor:
        sizes = torch.tensor([frames.shape[1:3]]).expand(len(frames), 2)
        return torch.stack(self.model.encode(normalise(frames), sizes).image_tokens).long()

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        return self.in_batches(self._decode, tokens)

    def _decode(self, tokens: Tensor) -> Tensor:
        return paint((self.model.decode(tokens.long()) + 1) * 127.5, "nearest")

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        config = {**self.model.config.to_diff_dict(), "kind": KIND}
        self.write(Path(folder), config, WEIGHTS_NAME, dtype)


def load_emu3_tokenizer(folder: Path) -> Emu3Tokenizer:
    """Load what `save_pretrained` wrote."""
    fields, weights = read_json_object(folder / CONFIG_NAME), folder / WEIGHTS_NAME
    return emu3_tokenizer(fields, read_tensors(weights), weights)


def emu3_tokenizer(
    fields: Mapping[str, Any], weights: Mapping[str, Tensor], where: str | Path
) -> Emu3Tokenizer:
    """Build the tokenizer that fields of `Emu3VQVAEConfig` describe around its weights."""
    from transformers import Emu3VQVAE, Emu3VQVAEConfig  # slow to import

    known = {field.name for field in dataclasses.fields(Emu3VQVAEConfig)}
    config = Emu3VQVAEConfig(**{name: fields[name] for name in known & fields.keys()})
    with torch.device("meta"):
        model = Emu3VQVAE(config)
    # counts of training steps are whole numbers
    own = {name: value.float().clone() for name, value in weights.items()}
    check_fit(model, own, where)
    assign_weights(model, own, where)
    return Emu3Tokenizer(model)
