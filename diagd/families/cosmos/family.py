"""NVIDIA Cosmos-Predict1 autoregressive checkpoints: 4B and 12B, and 5B and 13B Video2World.

The file holds weights only. Sizes come from their shapes; what leaves no trace in them (the grid,
YaRN) is that of the released models unless a config file with the original field names says other.
"""

from dataclasses import replace

from torch import Tensor

from diagd.families.cosmos import presets
from diagd.families.cosmos.presets import PRESETS
from diagd.families.cosmos.tokenizer import DECODER_NAME, ENCODER_NAME, CosmosTokenizer
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import (
    Checkpoint,
    Family,
    ReleasedFormat,
    Source,
    TokenizerFolder,
    count_layers,
    rename,
)
from diagd.models.config import ModelConfig

_BLOCK = "model.layers.{i}."
_MODULES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    _BLOCK + "input_layernorm": "layers.{i}.attention_norm",
    _BLOCK + "post_attention_layernorm": "layers.{i}.ffn_norm",
    _BLOCK + "mlp.gate_proj": "layers.{i}.feed_forward.w1",
    _BLOCK + "mlp.up_proj": "layers.{i}.feed_forward.w3",
    _BLOCK + "mlp.down_proj": "layers.{i}.feed_forward.w2",
}
_ATTENTION = {f"{letter}_proj": f"w{letter}" for letter in "qkvo"}
_ATTENTION |= {"q_norm": "q_norm", "k_norm": "k_norm"}
_SELF = {_BLOCK + f"self_attn.{a}": f"layers.{{i}}.attention.{b}" for a, b in _ATTENTION.items()}
_CROSS = {_BLOCK + "cross_attention_layernorm": "layers.{i}.cross_attention_norm"}
_CROSS |= {
    _BLOCK + f"cross_attn.{a}": f"layers.{{i}}.cross_attention.{b}" for a, b in _ATTENTION.items()
}
_EMBEDDING = "tok_embeddings.weight"
_CONTEXT_FRAMES = 1 + presets.TEMPORAL_COMPRESSION  # two grids


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side = source.side
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in source.tensors.items()
        if "_extra_state" not in name  # of TransformerEngine
    }
    num_layers = count_layers(tensors, "layers.")
    has_text = "layers.0.cross_attention.wq.weight" in tensors
    weights = rename(tensors, {**_MODULES, **_SELF, **(_CROSS if has_text else {})}, num_layers)
    embedding_rows, hidden_size = tensors[_EMBEDDING].shape
    head_dim = len(tensors["layers.0.attention.q_norm.weight"])
    vocab_size = len(tensors["output.weight"])
    sizes = {(p.hidden_size, p.num_layers): p for p in PRESETS.values()}
    released = sizes.get((hidden_size, num_layers), PRESETS["cosmos-4b"])
    frames, height, width = side.get("video_latent_shape") or presets.LATENT_SHAPE
    has_yarn = side.get("apply_yarn", released.yarn_factor != 1)
    yarn_shape = side.get("original_latent_shape") or (released.yarn_frames, released.yarn_height)
    config = replace(
        released,
        hidden_size=hidden_size,
        intermediate_size=len(tensors["layers.0.feed_forward.w1.weight"]),
        num_layers=num_layers,
        num_heads=len(tensors["layers.0.attention.wq.weight"]) // head_dim,
        num_kv_heads=len(tensors["layers.0.attention.wk.weight"]) // head_dim,
        head_dim=head_dim,
        vocab_size=vocab_size,
        image_vocab_size=vocab_size,
        max_positions=frames * height * width + has_text,
        grid_height=height,
        grid_width=width,
        prefix_length=int(has_text),
        extra_embeddings=embedding_rows - vocab_size,
        norm_eps=float(side.get("norm_eps", released.norm_eps)),
        rope_theta=float(side.get("rope_theta", released.rope_theta)),
        yarn_factor=float(side.get("yarn_scale") or presets.YARN_FACTOR) if has_yarn else 1.0,
        yarn_frames=yarn_shape[0],
        yarn_height=yarn_shape[1],
        context_size=tensors["layers.0.cross_attention.wk.weight"].shape[1] if has_text else 0,
        position_table=bool(side.get("apply_abs_pos_emb", has_text)),
    )
    return config, weights


def _defaults(found: Checkpoint) -> GenerationDefaults:
    is_small = found.config.num_layers <= PRESETS["cosmos-4b"].num_layers
    return GenerationDefaults(
        fps=25,
        context_frames=_CONTEXT_FRAMES,
        num_frames=presets.WINDOW - _CONTEXT_FRAMES,
        row_lag=2 if is_small else 1,
        overlap=True,
        top_p=0.7 if found.config.context_size else 0.8,
    )


COSMOS = Family(
    name="Cosmos",
    licence="weights: NVIDIA Open Model License; code: Apache-2.0",
    released=ReleasedFormat(
        files=("model.pt",),
        config_fields=frozenset({"dim", "n_layers"}),
        signature=(_EMBEDDING, "model." + _EMBEDDING),
        convert=_convert,
    ),
    tokenizer_folder=TokenizerFolder(
        CosmosTokenizer.from_jit, torchscript=(ENCODER_NAME, DECODER_NAME)
    ),
    defaults=_defaults,
    presets=PRESETS,
)
