"""LlamaGen: class-conditional images (arXiv:2406.06525), each a video of one frame.

The files hold weights only. The number of heads follows from the sizes, and the size of the image
from the name of the file (`c2i_L_384.pt`), unless a config file says `image_size` or `n_head`.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from diagd.families.defaults import image_defaults
from diagd.families.family import (
    Checkpoint,
    Family,
    ReleasedFormat,
    Source,
    count_layers,
    rename,
)
from diagd.families.llamagen.presets import (
    HEAD_DIM,
    PATCH_PX,
    PRESETS,
    ImageNetClasses,
    llamagen,
)
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VQTokenizer
from diagd.tokenizers.vqgan import read_vqgan
from diagd.weight_files import read_tensors

_BLOCK, _EMBEDDING, _HEAD = "model.layers.{i}.", "tok_embeddings.weight", "output.weight"
_CLASSES, _TEXT = "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"
_MODULES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    _BLOCK + "input_layernorm": "layers.{i}.attention_norm",
    _BLOCK + "post_attention_layernorm": "layers.{i}.ffn_norm",
    **{f"{_BLOCK}self_attn.{x}_proj": f"layers.{{i}}.attention.{x}" for x in "qkv"},
    _BLOCK + "self_attn.o_proj": "layers.{i}.attention.wo",
    _BLOCK + "mlp.gate_proj": "layers.{i}.feed_forward.w1",
    _BLOCK + "mlp.up_proj": "layers.{i}.feed_forward.w3",
    _BLOCK + "mlp.down_proj": "layers.{i}.feed_forward.w2",
}


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors, side = dict(source.tensors), source.side
    if _TEXT in tensors:
        raise ValueError("a text-conditional model, and only class-conditional ones are known here")
    tensors.pop("freqs_cis", None)  # computed anew
    classes, codes = tensors.pop(_CLASSES), tensors[_EMBEDDING]
    (num_codes, hidden_size), num_layers = codes.shape, count_layers(tensors, "layers.")
    sizes = {(p.hidden_size, p.num_layers): p.num_heads for p in PRESETS.values()}
    num_heads = sizes.get((hidden_size, num_layers), hidden_size // HEAD_DIM)
    num_heads = int(side.get("n_head", num_heads))
    named = re.search(r"_(256|384|512)(?!\d)", source.path.name)
    image_px = int(side.get("image_size", named[1] if named else 256))
    for i in range(num_layers):
        # they turn the pairs (2i, 2i + 1), we (i, i + D / 2)
        parts = tensors.pop(f"layers.{i}.attention.wqkv.weight").chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            if name != "v":
                part = part.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            tensors[f"layers.{i}.attention.{name}.weight"] = part
    # classes are ids behind the visual ones; the output layer never chooses them
    tensors[_EMBEDDING] = torch.cat([codes, classes])
    head = tensors[_HEAD]
    tensors[_HEAD] = torch.cat([head, head.new_zeros(classes.shape)])
    config = replace(
        llamagen(hidden_size, num_layers, num_heads, image_px // PATCH_PX),
        intermediate_size=len(tensors["layers.0.feed_forward.w1.weight"]),
        vocab_size=num_codes + len(classes),
        image_vocab_size=num_codes,
    )
    return config, rename(tensors, _MODULES, num_layers)


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    files = sorted(found.path.parent.glob("vq_ds16*.pt"))
    if len(files) != 1:
        raise ValueError(
            f"{found.path}: expected its tokenizer, such as vq_ds16_c2i.pt, beside it "
            f"(or a folder with --tokenizer), got {len(files)} files vq_ds16*.pt"
        )
    return llamagen_tokenizer(files[0])


def llamagen_tokenizer(path: Path) -> VQTokenizer:
    """Load a tokenizer file of LlamaGen: a VQ-GAN whose codes have length 1."""
    return read_vqgan(read_tensors(path), path, by_direction=True)


LLAMAGEN = Family(
    name="LlamaGen",
    licence="code: MIT; weights: see FoundationVision/LlamaGen",
    released=ReleasedFormat(
        files=("c2i_*.pt", "t2i_*.pt"),
        config_fields=frozenset({"image_size", "n_head"}),
        signature=(_CLASSES, _TEXT),
        convert=_convert,
    ),
    tokenizer=_tokenizer,
    actions=ImageNetClasses(),
    defaults=lambda found: image_defaults(top_k=2000, top_p=None, guidance=4.0, keep_frames=0),
    presets=PRESETS,
)
