"""LlamaGen: images from classes or texts (arXiv:2406.06525), as videos of one frame.

The files hold weights only. The number of heads follows from the sizes, and the size of the image
from the name of the file (`c2i_L_384.pt`), unless a config file says `image_size` or `n_head`.

A text is the states of a T5 encoder after two layers. Learned vectors replace an empty text, of
which the last ones are used, as many as the text has tokens. The authors pad both at the front to
120 places, hide the padding, and do not count its positions: here it is left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from diagd.data.actions import ActionVocabulary
from diagd.families.defaults import image_defaults
from diagd.families.family import Checkpoint, Family, Source, TextFolder
from diagd.families.presets import LLAMAGEN as PRESETS
from diagd.families.weights import META_NAMES, count_layers, rename, sizes_of
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, text_states
from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import read_tensors

_EMBEDDING, _HEAD = "tok_embeddings.weight", "output.weight"
_CLASSES, _NO_TEXT = "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"
_LEFT_OUT = r"^cls_embedding\.(embedding_table|uncond_embedding|cap_proj\.fc.\.weight)"
_MODULES = META_NAMES | {
    f"model.layers.{{i}}.self_attn.{x}_proj": f"layers.{{i}}.attention.{x}" for x in "qkv"
}

_NUM_CLASSES, _PATCH_PX = 1000, 16


@dataclass(frozen=True)
class ImageNetClasses(ActionVocabulary):
    """The class of an image, `class 207` or `207`, a token before it; the last id is no class."""

    names: tuple[str, ...] = (*(f"class {number}" for number in range(_NUM_CLASSES)), "none")

    def id_of(self, name: str) -> int:
        if name == "none":
            return _NUM_CLASSES
        if not (match := re.fullmatch(r"(?:class )?([0-9]{1,3})", name)):
            raise ValueError(f"unknown class {name!r}, expected class 0 to class 999, or none")
        return int(match[1])


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors, side = dict(source.tensors), source.side
    codes, places = tensors[_EMBEDDING], 0
    # tokens before an image have ids after the visual ones; the output layer never predicts them
    if _NO_TEXT in tensors:
        places = len(tensors[_NO_TEXT])
        rows = _project(tensors, tensors[_NO_TEXT])
        fed = torch.cat([torch.zeros_like(rows), rows])  # of a text, replaced on use; of no text
    else:
        fed, head = tensors[_CLASSES], tensors[_HEAD]
        tensors[_HEAD] = torch.cat([head, head.new_zeros(fed.shape)])
    tensors[_EMBEDDING] = torch.cat([codes, fed.to(codes.dtype)])
    (num_codes, hidden_size), num_layers = codes.shape, count_layers(tensors, "layers.")
    sizes = {(p.hidden_size, p.num_layers): p.num_heads for p in PRESETS.values()}
    num_heads = sizes.get((hidden_size, num_layers), hidden_size // 64)
    num_heads = int(side.get("n_head", num_heads))
    named = re.search(r"_(256|384|512)(?!\d)", source.path.name)
    grid_side = int(side.get("image_size", named[1] if named else 256)) // _PATCH_PX
    for i in range(num_layers):
        # their rotation uses pairs (2i, 2i + 1), ours (i, i + D / 2)
        parts = tensors.pop(f"layers.{i}.attention.wqkv.weight").chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            if name != "v":
                part = part.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            tensors[f"layers.{i}.attention.{name}.weight"] = part
    weights = rename(tensors, _MODULES, _LEFT_OUT)
    config = replace(
        PRESETS["llamagen-l"],
        **sizes_of(weights, num_heads),
        image_vocab_size=num_codes,
        max_positions=grid_side**2 + (places or 1),
        grid_height=grid_side,
        grid_width=grid_side,
        num_action_tokens=int(not places),
        prefix_length=places,
    )
    return config, weights


def _project(tensors: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """Return embedding rows (N, hidden_size) of states (N, size), in float32."""
    first, second = (tensors[f"cls_embedding.cap_proj.fc{i}.weight"].float() for i in (1, 2))
    hidden = functional.linear(states.float(), first)
    return functional.linear(functional.gelu(hidden, approximate="tanh"), second)


class LlamaGenPrompts(TextPrompts):
    """A text's projected states, one vector per token; the encoder is loaded for each new text."""

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        self.first, self.places = found.config.vocab_size, found.config.prefix_length
        tensors = found.source.tensors
        given = read_json_object(folder / "config.json").get("d_model")
        if given != (size := tensors[_NO_TEXT].shape[1]):
            raise ValueError(f"expected d_model {size}, got {given}")
        self._read = lru_cache(1024)(  # `evaluate` repeats texts
            lambda text: _project(tensors, text_states(text, folder, self.places))
        )

    def __call__(self, text: str) -> TextIds:
        vectors = self._read(" ".join(text.lower().split()))
        ids = self.first + torch.arange(self.places - len(vectors), self.places)[None]
        return TextIds(ids, ids + self.places, vectors)


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    kind = "t2i" if found.config.prefix_length else "c2i"
    if len(files := sorted(found.path.parent.glob(f"vq_ds16_{kind}*.pt"))) != 1:
        raise ValueError(
            f"{found.path}: expected its tokenizer, such as vq_ds16_{kind}.pt, beside it "
            f"(or a folder with --tokenizer), got {len(files)} files vq_ds16_{kind}*.pt"
        )
    return read_vqgan(read_tensors(files[0]), files[0], by_direction=True)


LLAMAGEN = Family(
    name="LlamaGen",
    licence="code: MIT; weights: see FoundationVision/LlamaGen",
    files=("c2i_*.pt",),
    config_fields=frozenset({"image_size", "n_head"}),
    signature=(_CLASSES,),
    convert=_convert,
    tokenizer=_tokenizer,
    actions=ImageNetClasses(),
    defaults=lambda found: image_defaults(top_k=2000, top_p=None, guidance=4.0, keep_frames=0),
)
LLAMAGEN_T2I = replace(
    LLAMAGEN,
    name="LlamaGen-T2I",
    files=("t2i_*.pt",),
    signature=(_NO_TEXT,),
    actions=None,
    text=TextFolder(("t5",), LlamaGenPrompts, encoder="google/flan-t5-xl"),
    defaults=lambda found: image_defaults(top_k=1000, top_p=None, guidance=7.5, keep_frames=0),
)
