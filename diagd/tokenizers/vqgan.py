"""VQ-GANs of taming-transformers and what descends from them, read into diffusers' VQModel."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

from diagd.files import naming
from diagd.tokenizers.vq import VQTokenizer, load_vq_model
from diagd.weight_files import rename_by

_PARTS = re.compile(r"(encoder|decoder|quantize|quant_conv|post_quant_conv)\.")
# Names of LlamaGen and of taming-transformers, which diffusers' VQModel has otherwise.
_RENAMED = (
    (r"^encoder\.(conv_blocks|down)\.", "encoder.down_blocks."),
    (r"^decoder\.(conv_blocks|up)\.", "decoder.up_blocks."),
    (r"\.(res|block)\.", ".resnets."),
    (r"\.attn\.", ".attentions."),
    (r"\.(down|up)sample\.", r".\1samplers.0."),
    (r"\.mid\.(0|block_1)\.", ".mid_block.resnets.0."),
    (r"\.mid\.(1|attn_1)\.", ".mid_block.attentions.0."),
    (r"\.mid\.(2|block_2)\.", ".mid_block.resnets.1."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"(attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)


def read_vqgan(
    tensors: Mapping[str, Tensor], where: Path, by_direction: bool = False, **how: Any
) -> VQTokenizer:
    """Build a tokenizer from the tensors of a VQ-GAN; what belongs to its training is left out.

    With `by_direction`, latents are compared with codes by direction, and codes have length 1.
    Errors say `where` the tensors are from; `how` are further arguments of `VQTokenizer`.
    """
    weights = {
        # what is linear in attention is a convolution of one pixel there
        name: tensor.flatten(1) if "attentions." in name and tensor.ndim == 4 else tensor
        for name, tensor in rename_by(_RENAMED, tensors).items()
        if _PARTS.match(name) and name != "quantize.codebook_used"
    }
    count = len({name.split(".")[2] for name in weights if "encoder.down_blocks." in name})
    if "decoder.up_blocks.0.upsamplers.0.conv.weight" not in weights and count > 1:
        # taming numbers the blocks of a decoder from the largest picture on
        block = r"^(decoder\.up_blocks)\.(\d+)"
        turned = [(block, lambda at: f"{at[1]}.{count - 1 - int(at[2])}")]
        weights = rename_by(turned, weights)
    first = "encoder.down_blocks.0.resnets."
    with naming(f"{where}: no VQ-GAN", KeyError):
        codes = weights["quantize.embedding.weight"].float()
        block = "encoder.down_blocks.{}.resnets.0.conv1.weight"
        channels = [len(weights[block.format(i)]) for i in range(count)]
        latent_channels = len(weights["encoder.conv_out.weight"])
    if by_direction:  # the nearest direction is the nearest code, for codes of one length
        weights["quantize.embedding.weight"] = functional.normalize(codes, dim=-1)
    attend = [
        ["Attn" * (f"{side}_blocks.{i}.attentions.0.to_q.weight" in weights) for i in range(count)]
        for side in ("encoder.down", "decoder.up")
    ]
    fields = {
        "_class_name": "VQModel",
        "down_block_types": [f"{kind}DownEncoderBlock2D" for kind in attend[0]],
        "up_block_types": [f"{kind}UpDecoderBlock2D" for kind in attend[1]],
        "block_out_channels": channels,
        "layers_per_block": len({name.split(".")[4] for name in weights if first in name}),
        "latent_channels": latent_channels,
        "num_vq_embeddings": codes.shape[0],
        "vq_embed_dim": codes.shape[-1],
    }
    return VQTokenizer(load_vq_model(fields, where, weights, where), **how)
