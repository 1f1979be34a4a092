"""IRIS (arXiv:2209.00588): world models of Atari games, a GPT over frames of few tokens.

A checkpoint holds an agent: its tokenizer (a VQ-GAN), its world model, and an actor with a critic,
which is dropped. The world model is minGPT: LayerNorms, biases, exact GELU, learned positions; a
frame is K x K codes, followed by one action. Codes and actions have separate tables, and a layer
with ReLU precedes the output layer. Rewards and ends of episodes are not predicted here.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from diagd.data.actions import ActionVocabulary
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source
from diagd.families.presets import IRIS as PRESETS
from diagd.families.weights import rename, sizes_of
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import rename_by, tensors_under

ATARI = (
    *("noop", "fire", "up", "right", "left", "down", "upright", "upleft", "downright", "downleft"),
    *("upfire", "rightfire", "leftfire", "downfire"),
    *("uprightfire", "upleftfire", "downrightfire", "downleftfire"),
)
_BLOCK, _THEIRS = "model.layers.{i}.", "transformer.blocks.{i}."
_EMBEDDING, _POSITIONS = "embedder.embedding_tables.{}.weight", "pos_emb.weight"
_HEAD = "head_observations."
_ATTENTION = ("q", "query"), ("k", "key"), ("v", "value"), ("o", "proj")
_MODULES = {
    "model.embed_tokens": "embeddings",
    "model.embed_positions": "pos_emb",
    "model.norm": "transformer.ln_f",
    "head_proj": f"{_HEAD}head_module.0",
    "lm_head": f"{_HEAD}head_module.2",
    _BLOCK + "input_layernorm": _THEIRS + "ln1",
    _BLOCK + "post_attention_layernorm": _THEIRS + "ln2",
    **{_BLOCK + f"self_attn.{ours}_proj": _THEIRS + f"attn.{name}" for ours, name in _ATTENTION},
    _BLOCK + "mlp.up_proj": _THEIRS + "mlp.0",
    _BLOCK + "mlp.down_proj": _THEIRS + "mlp.2",
}
# Our layer before the output layer has a GELU, which approaches a ReLU when its input is this much
# larger, up to an error of 0.17 / STEEP; a power of two, so that no weight is rounded.
STEEP = 2.0**12


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors = tensors_under("world_model.", source.tensors)
    actions, codes = (tensors.pop(_EMBEDDING.format(table)) for table in (0, 1))
    # outputs of each head: K * K per frame for the head of codes, one for that of rewards
    num_places, num_frames = (len(tensors[f"{head}indices"]) for head in (_HEAD, "head_rewards."))
    side = math.isqrt(num_places // num_frames)
    if side**2 * num_frames != num_places:
        raise ValueError(
            f"frames must be square grids of tokens, got {num_places / num_frames:g} tokens"
        )
    tensors["embeddings.weight"] = torch.cat([codes, actions])
    for kind in ("weight", "bias"):
        name = f"{_HEAD}head_module.0.{kind}"
        tensors[name] = tensors[name] * STEEP  # the memory-mapped file is unchanged
    # the output layer never predicts actions
    last = f"{_HEAD}head_module.2"
    weight, bias = tensors[f"{last}.weight"] / STEEP, tensors[f"{last}.bias"]
    tensors[f"{last}.weight"] = functional.pad(weight, (0, 0, 0, len(actions)))
    tensors[f"{last}.bias"] = functional.pad(bias, (0, len(actions)), value=-1e4)
    weights = rename(tensors, _MODULES, left_out=r"^head_(rewards|ends)\.|\.indices$")
    num_heads = int(source.side.get("num_heads", PRESETS["iris"].num_heads))  # not in the file
    config = replace(
        PRESETS["iris"],
        **sizes_of(weights, num_heads),
        image_vocab_size=len(codes),
        max_positions=len(tensors[_POSITIONS]),
        grid_height=side,
        grid_width=side,
    )
    return config, weights


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    names = ("pre_quant_conv", "quant_conv"), (r"embedding\.", "quantize.embedding.")
    tensors = rename_by(names, tensors_under("tokenizer.", found.source.tensors))
    return read_vqgan(tensors, found.path, pixel_rounding="down", stretch_frames=True)


def _actions(found: Checkpoint) -> ActionVocabulary:
    """Name a game's actions, of which a checkpoint stores only the number: the first is idle."""
    count = found.config.vocab_size - found.config.image_vocab_size
    numbered = ("noop", *(f"action {number}" for number in range(1, count)))
    return ActionVocabulary(ATARI if count == len(ATARI) else numbered)


IRIS = Family(
    name="IRIS",
    licence="code: GPL-3.0; weights: see eloialonso/iris",
    files=("last.pt",),
    signature=(f"world_model.{_POSITIONS}",),
    convert=_convert,
    tokenizer=_tokenizer,
    name_actions=_actions,
    defaults=lambda found: GenerationDefaults(fps=15, context_frames=1, top_p=None, keep_frames=1),
)
