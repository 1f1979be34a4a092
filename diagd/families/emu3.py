"""Emu3 (arXiv:2409.18869): text to image, by a LLaMA whose vocabulary holds codes and words.

Loaded from a folder of transformers' `Emu3ForConditionalGeneration`. Codes are scattered over its
vocabulary; ours begins with them, followed by the token that ends a row, and the words, which are
input only. So an image has one column more than its tokenizer's grid. `grid_height` and
`grid_width` in config.json set an image size other than 90 x 90 tokens.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.checks import brief
from diagd.families.defaults import image_defaults
from diagd.families.family import Checkpoint, Family, Source, TextFolder, TokenizerFolder
from diagd.families.presets import EMU3 as PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, read_words, text_ids
from diagd.tokenizers.vq import CONFIG_NAME, WEIGHTS_NAME, FrameTokenizer, normalise, paint
from diagd.weight_files import build_fitting, read_tensors, rename_by, tensors_under

KIND = "emu3_vqgan"  # of tokenizer folders
_SIDE = PRESETS["emu3"].grid_height  # tokens per side
_ROW_END = "<|extra_200|>"
_TEXT_MODEL = r"^(model\.)?text_model\.(model\.)?|^(?=lm_head)"  # names depend on the version
_PIXELS = r"^(model\.)?vqmodel\."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_WORDS = 2**24


def _their_ids(side: Mapping[str, Any]) -> Tensor:
    """Return the id in their vocabulary of each of our ids, (V,) int64."""
    names, text, pixels = side["vocabulary_map"], side["text_config"], side["vq_config"]
    codes = [names[f"<|visual token {code:06d}|>"] for code in range(pixels["codebook_size"])]
    visual = torch.tensor([*codes, names[_ROW_END]])
    if not 0 < text["vocab_size"] <= _MAX_WORDS:
        raise ValueError(f"vocab_size must be 1 to {_MAX_WORDS}, got {brief(text['vocab_size'])}")
    is_word = torch.ones(text["vocab_size"], dtype=torch.bool)
    is_word[visual] = False
    return torch.cat([visual, is_word.nonzero()[:, 0]])


def _complete(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return their config with its defaults, which files may omit."""
    from transformers import Emu3Config  # slow to import

    return {**side, **Emu3Config(**side).to_dict()}


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    if "vocabulary_map" not in source.side:
        raise ValueError("expected a config.json with vocabulary_map beside it")
    side = _complete(source.side)
    text, order = side["text_config"], _their_ids(side)
    language = {n: tensor for n, tensor in source.tensors.items() if not re.match(_PIXELS, n)}
    named = rename_by([(_TEXT_MODEL, "model."), (r"^model\.lm_head", "lm_head")], language)
    num_codes = side["vq_config"]["codebook_size"] + 1
    embedding = named[_EMBEDDING]
    head = named.get(_HEAD, embedding)  # tied to the embedding if absent
    weights = {**named, _EMBEDDING: embedding[order], _HEAD: head[order[:num_codes]]}
    config = ModelConfig(
        **llama_fields(weights, text, PRESETS["emu3"]),
        image_vocab_size=num_codes,
        grid_height=int(side.get("grid_height", _SIDE)),
        grid_width=int(side.get("grid_width", _SIDE)) + 1,
        prefix_length=1,
    )
    return config, weights


class Emu3Tokenizer(FrameTokenizer):
    """The VQ model of transformers, run on one image at a time."""

    batch_size = 1  # a frame of 720 px has 133 million activations at its widest

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.codebook_size = model.config.codebook_size
        self.compression = model.spatial_scale_factor

    def _encode(self, frames: Tensor) -> Tensor:
        sizes = torch.tensor([frames.shape[1:3]]).expand(len(frames), 2)
        return torch.stack(self.model.encode(normalise(frames), sizes).image_tokens).long()

    def _decode(self, tokens: Tensor) -> Tensor:
        return paint((self.model.decode(tokens.long()) + 1) * 127.5, "nearest")

    def _config(self) -> Mapping[str, object]:
        return {**self.model.config.to_diff_dict(), "kind": KIND}


def load_emu3_tokenizer(folder: Path) -> Emu3Tokenizer:
    fields, weights = read_json_object(folder / CONFIG_NAME), folder / WEIGHTS_NAME
    return emu3_tokenizer(fields, read_tensors(weights), weights)


def emu3_tokenizer(
    fields: Mapping[str, Any], weights: Mapping[str, Tensor], where: str | Path
) -> Emu3Tokenizer:
    """Build the tokenizer of an `Emu3VQVAEConfig` around its weights."""
    from transformers import Emu3VQVAE, Emu3VQVAEConfig  # slow to import

    known = {field.name for field in dataclasses.fields(Emu3VQVAEConfig)}
    config = Emu3VQVAEConfig(**{name: fields[name] for name in known & fields.keys()})
    # counts of training steps are integers
    own = {name: value.float().clone() for name, value in weights.items()}
    blocks = max(config.num_res_blocks, math.log2(config.temporal_downsample_factor))
    if blocks > len(own):  # they would be built one by one
        raise ValueError(f"{where}: config has {blocks} blocks in a row, file {len(own)} tensors")
    return Emu3Tokenizer(build_fitting(lambda: Emu3VQVAE(config), own, where))


def _tokenizer(found: Checkpoint) -> Emu3Tokenizer:
    tensors = rename_by([(_PIXELS, "vqmodel.")], found.source.tensors)
    fields = _complete(found.source.side)["vq_config"]
    return emu3_tokenizer(fields, tensors_under("vqmodel.", tensors), found.path)


class Emu3Prompts(TextPrompts):
    """A text, then start and size of the image, as in transformers' `Emu3Processor`."""

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        side = read_json_object(folder / "config.json")
        self.words = names = read_words(folder, side)
        size = f"{found.config.grid_height}*{found.config.grid_width - 1}"
        self.behind = f"{names.boi_token}{size}{names.image_wrapper_token}"
        theirs = _their_ids(_complete(side))
        self.ours = torch.empty_like(theirs)
        self.ours[theirs] = torch.arange(len(theirs))

    def __call__(self, text: str) -> TextIds:
        return TextIds(self._ids(text), self._ids(""))

    def _ids(self, text: str) -> Tensor:
        return self.ours[torch.tensor([text_ids(self.words, text + self.behind)])]


EMU3 = Family(
    name="Emu3",
    licence="code and weights: Apache-2.0",
    signature=("text_model.model.embed_tokens.weight", "model.text_model.embed_tokens.weight"),
    convert=_convert,
    tokenizer=_tokenizer,
    tokenizer_folder=TokenizerFolder(load_emu3_tokenizer, kind=KIND),
    text=TextFolder(("emu3",), Emu3Prompts),
    defaults=lambda found: image_defaults(top_k=2048, top_p=None, guidance=3.0, row_ends=True),
)
