"""Emu3.5 (arXiv:2510.26583): text to image, by a Qwen3 whose vocabulary ends with codes.

Loaded from its makers' folder. Our vocabulary begins with the codes, followed by the token that
ends a row, and the words, which are input only. Sampling is by kind of token there: text and image
start are not drawn here but given, as are size and row ends, so only the options of codes matter.
The image end, which stands behind the last row, is written as the end of a row: nothing reads it.
`grid_height` and `grid_width` in config.json set an image size other than 55 x 73 tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.families.defaults import image_defaults
from diagd.families.family import Checkpoint, Family, Source, TextFolder
from diagd.families.presets import EMU35 as PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, read_ranks
from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import read_tensors

_USUAL = PRESETS["emu3.5"]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_RANKS = "emu3.tiktoken"
# In order, after the words of the text tokenizer and before the codes
_NAMES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    *("<|image token|>", "<|image start|>", "<|image end|>"),
)
_BOS, _ANSWER, _ROW_END = "<|extra_203|>", "<|extra_100|>", "<|extra_200|>"
_ASKED = " for t2i task"


def _first_special(side: Mapping[str, Any]) -> int:
    """Return the id of the first of `_NAMES`, which is the number of words."""
    first_code = int(side.get("visual_token_offset", 151854))  # a name of FlashAR's configs
    if first_code <= len(_NAMES):
        raise ValueError(f"visual_token_offset must be above {len(_NAMES)}, got {first_code}")
    return first_code - len(_NAMES)


def _row_end(side: Mapping[str, Any]) -> int:
    return _first_special(side) + _NAMES.index(_ROW_END)


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side, weights = source.side, dict(source.tensors)
    embedding, head, row_end = weights[_EMBEDDING], weights[_HEAD], _row_end(side)
    first_code = _first_special(side) + len(_NAMES)
    if first_code >= len(embedding):
        raise ValueError(f"expected codes from id {first_code} on, got {len(embedding)} ids")
    visual = [slice(first_code, None), slice(row_end, row_end + 1)]
    words = [slice(row_end), slice(row_end + 1, first_code)]
    weights[_EMBEDDING] = torch.cat([embedding[ids] for ids in (*visual, *words)])
    weights[_HEAD] = torch.cat([head[ids] for ids in visual])
    config = ModelConfig(
        **llama_fields(weights, {"rope_theta": _USUAL.rope_theta} | dict(side), _USUAL),
        image_vocab_size=len(weights[_HEAD]),
        grid_height=int(side.get("grid_height", _USUAL.grid_height)),
        grid_width=int(side.get("grid_width", _USUAL.grid_width - 1)) + 1,
        prefix_length=1,
        qk_norm=True,
    )
    return config, weights


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    if not (path := found.path.parent / "tokenizer" / "model.ckpt").is_file():
        raise ValueError(
            f"{found.path}: holds no decoder of images: put model.ckpt of "
            f"BAAI/Emu3.5-VisionTokenizer into {path.parent}, or name a folder with --tokenizer"
        )
    return read_vqgan(read_tensors(path), path, pixel_rounding="down", by_product=True)


class Emu35Prompts(TextPrompts):
    """A request that holds the text, or no text, then start and size of the image."""

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        side = read_json_object(folder / "config.json")
        num_words, num_visual = _first_special(side), found.config.image_vocab_size
        self.words = read_ranks(folder / _RANKS, num_words, _NAMES)
        self.ours = num_visual + torch.arange(num_words + len(_NAMES))
        self.ours[_row_end(side) :] -= 1
        self.ours[_row_end(side)] = num_visual - 1
        size = f"{found.config.grid_height}*{found.config.grid_width - 1}"
        self.behind = f" ASSISTANT: {_ANSWER}<|image start|>{size}<|image token|>"

    def __call__(self, text: str) -> TextIds:
        return TextIds(self._ids(text, _ASKED), self._ids("", ""))

    def _ids(self, text: str, task: str) -> Tensor:
        said = f"{_BOS}You are a helpful assistant{task}. USER: {text}{self.behind}"
        return self.ours[torch.tensor([self.words(said, add_special_tokens=False).input_ids])]


EMU35 = Family(
    name="Emu3.5",
    licence="code and weights: Apache-2.0",
    signature=("model.layers.0.self_attn.q_norm.weight",),
    convert=_convert,
    fits=lambda source: source.side.get("model_type") == "Emu3",
    tokenizer=_tokenizer,
    text=TextFolder(("Emu3",), Emu35Prompts, file=_RANKS),
    defaults=lambda found: image_defaults(top_k=5120, top_p=None, guidance=5.0, row_ends=True),
)
