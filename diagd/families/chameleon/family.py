"""Chameleon and Anole (arXiv:2405.09818, 2407.06135): images from text, a video of one frame each.

A LLaMA with LayerNorms on each head's queries and keys reads and writes one vocabulary. Here it
writes images alone: an image id is the number of its code, and any id of the vocabulary stands
behind all columns of the logits, at `vocab_size` + its own number.

Folders are those of transformers (`ChameleonForConditionalGeneration`). They have no decoder of
images: that is in Meta's `vqgan.ckpt`, which belongs into their folder `tokenizer`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from diagd.families.chameleon.presets import EPS, HEADS, MAX_POSITIONS, PRESETS
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import (
    Checkpoint,
    Family,
    ReleasedFormat,
    Source,
    TextFolder,
    TextIds,
)
from diagd.families.llama import llama_fields
from diagd.families.words import read_words
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VQTokenizer
from diagd.tokenizers.vqgan import read_vqgan
from diagd.weight_files import read_tensors

_EMBEDDING, _HEAD, _PIXELS = "model.embed_tokens.weight", "lm_head.weight", "model.vqmodel."
_IMAGE, _DIGITS = "IMGIMG", str.maketrans("ABCDEFGHIJ", "0123456789")


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side = {"num_attention_heads": HEADS, "rms_norm_eps": EPS} | dict(source.side)
    if side.get("swin_norm"):
        raise ValueError("swin_norm must be false: a block of the 30B model is not known here")
    if "z_loss_weight" in side:  # of its config class alone
        raise ValueError(
            "Lumina-mGPT, whose rows end in a token of their own, is not known here: "
            "use diagd.HuggingFaceModel (docs/models_huggingface.md)"
        )
    if side["rms_norm_eps"] != EPS:  # else the norms of heads would differ
        raise ValueError(f"rms_norm_eps must be {EPS}, got {side['rms_norm_eps']}")
    weights = {
        name: tensor.flatten() if "_norm." in name else tensor
        for name, tensor in source.tensors.items()
        if not name.startswith(_PIXELS)
    }
    table, images = weights[_EMBEDDING], torch.tensor(_image_ids(side["vocabulary_map"]))
    weights[_HEAD] = weights.get(_HEAD, table)[images]  # tied, it is the table
    weights[_EMBEDDING] = torch.cat([table[images], table])
    pixels = side.get("vq_config") or {}
    halvings = len(pixels.get("channel_multiplier", (1, 1, 2, 2, 4))) - 1
    num_rows = int(pixels.get("resolution", 512)) // 2**halvings
    config = ModelConfig(
        **llama_fields(weights, side),
        vocab_size=len(images),
        image_vocab_size=len(images),
        extra_embeddings=len(table),
        max_positions=int(side.get("max_position_embeddings", MAX_POSITIONS)),
        grid_height=num_rows,
        grid_width=num_rows,
        qk_norm=True,
        head_norm=True,
    )
    return config, weights


def _image_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Return the id of each code; that of code 207 is called IMGIMGCAHZ."""
    ids = {
        int(name.removeprefix(_IMAGE).removesuffix("Z").translate(_DIGITS)): number
        for name, number in vocabulary.items()
        if name.startswith(_IMAGE)
    }
    if not ids or sorted(ids) != list(range(len(ids))):
        raise ValueError(f"vocabulary_map must name image ids 0, 1, ..., got {len(ids)} of them")
    return [ids[code] for code in range(len(ids))]


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    path = found.path.parent / "tokenizer" / "vqgan.ckpt"
    if not path.is_file():
        raise ValueError(
            f"{found.path}: holds no decoder of images: put vqgan.ckpt of Meta's release into "
            f"{path.parent}, or name a folder with --tokenizer"
        )
    return chameleon_tokenizer(path)


def chameleon_tokenizer(path: Path) -> VQTokenizer:
    """Load Meta's `vqgan.ckpt`, which has the encoder and the decoder."""
    return read_vqgan(read_tensors(path), path)


class ChameleonPrompts:
    """BOS, a text and the image start; without a text, the other two."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.words, self.first = read_words(folder), config.vocab_size
        start = getattr(self.words, "boi_token", "<racm3:break>")
        self.start = self.words.convert_tokens_to_ids(start)

    def __call__(self, text: str) -> TextIds:
        bos = self.words.bos_token_id
        said = self.words(text, add_special_tokens=False).input_ids
        rows = ([bos, *said, self.start], [bos, self.start])
        return TextIds(*(self.first + torch.tensor([row]) for row in rows))


CHAMELEON = Family(
    name="Chameleon",
    licence="Chameleon Research License: research only; Anole: the same",
    released=ReleasedFormat(
        files=("*.index.json", "model.safetensors", "pytorch_model.bin"),
        config_fields=frozenset({"vocabulary_map"}),
        signature=("model.layers.0.self_attn.q_norm.bias",),
        convert=_convert,
    ),
    tokenizer=_tokenizer,
    text=TextFolder(("chameleon",), ChameleonPrompts),
    defaults=lambda found: GenerationDefaults(
        fps=1,
        context_frames=0,
        num_frames=1,
        temperature=0.7,
        guidance=3.0,
        keep_frames=0,
    ),
    presets=PRESETS,
)
