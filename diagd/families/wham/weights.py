"""Microsoft WHAM checkpoints: the Lightning files of the 200M and the 1.6B model.

A GPT with learned positions over frames of visual tokens and action tokens. Its image tokenizer
is in the same file, under `TOKENIZER_PREFIX`. Block versions differ in whether the norms inside the
blocks have parameters, which the tensors show; the number of heads they do not show.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diagd.families.family import ReleasedFormat, Renamed, Source, count_layers, rename
from diagd.families.wham.presets import PRESETS, SIZE_PX, WHAMActions
from diagd.models.config import ModelConfig
from diagd.weight_files import Record

TOKENIZER_PREFIX = "context_encoders.images."
HEAD_SIZE = 64  # of its image tokenizer, where nothing says other
_GPT = "predictor.gpt_model."
_BLOCK, _THEIRS = "model.layers.{i}.", "transformer.h.{i}."
_MODULES = {
    "model.embed_positions": "transformer.wpe",
    "model.embed_tokens": "lm_head",
    "model.norm": "transformer.ln_f",
    **{_BLOCK + f"self_attn.{n}_proj": _THEIRS + f"attn.c_attn {i}/3" for i, n in enumerate("qkv")},
    _BLOCK + "self_attn.o_proj": _THEIRS + "attn.c_proj",
    _BLOCK + "mlp.up_proj": _THEIRS + "mlp.c_fc",
    _BLOCK + "mlp.down_proj": _THEIRS + "mlp.c_proj",
}
_BLOCK_NORMS = {
    _BLOCK + "input_layernorm": _THEIRS + "ln_1",
    _BLOCK + "post_attention_layernorm": _THEIRS + "ln_2",
}
_HEADS_BY_NAME = {
    "chinchilla-251M": 16,
    "chinchilla-1018M": 14,
    "wham-4kvocab-1.6b": 18,
    "wham-3b": 24,
}
_HEADS_BY_SHAPE = {(m.num_layers, m.hidden_size): m.num_heads for m in PRESETS.values()}


def recognises(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of a WHAM checkpoint."""
    return f"{_GPT}transformer.wpe.weight" in tensors


def convert(source: Source) -> Renamed:
    """Rename the tensors of the transformer and tell the config.

    Raises:
        ValueError: Tensors are missing or unknown, or nothing tells the number of heads.
    """
    gpt = {
        name.removeprefix(_GPT): tensor
        for name, tensor in source.tensors.items()
        if name.startswith(_GPT) and not (name.endswith("attn.bias") and tensor.dim() == 4)
    }
    gpt.pop("transformer.wte.weight", None)  # tied to lm_head, which is read last where they differ
    num_layers = count_layers(gpt, "transformer.h.")
    has_norms = "transformer.h.0.ln_1.weight" in gpt
    weights = rename(gpt, {**_MODULES, **(_BLOCK_NORMS if has_norms else {})}, num_layers)
    return Renamed(_config(source, gpt, num_layers, has_norms), weights)


def frame_size_px(source: Source) -> tuple[int, int]:
    """Return height and width of a frame, in pixels, as the checkpoint or its side file says."""
    if "image_height" in source.side:
        return source.side["image_height"], source.side["image_width"]
    spec = _tokenizer_spec(source)
    height, width = spec.get("image_size_per_y_axis"), spec.get("image_size_per_x_axis")
    return (int(height), int(width)) if height and width else SIZE_PX


def head_size(source: Source) -> int:
    """Return the width of an attention head of the image tokenizer, as said or as usual."""
    given = source.side.get("vq_head_size") or _tokenizer_spec(source).get("head_size", HEAD_SIZE)
    return int(given)


def _tokenizer_spec(source: Source) -> dict[str, Any]:
    """Return what the hyper-parameters say of the image tokenizer (`head_size`, its frame size)."""
    images = source.hyper_parameters.get("context_encoder_args", {}).get("images")
    keywords = images.get("pl_kwargs", {}) if isinstance(images, Record) else {}
    variant = keywords.get("variant") or {}
    return {**variant, **(variant.get("model_spec") or {}), **(keywords.get("model_spec") or {})}


def _config(
    source: Source, gpt: Mapping[str, Tensor], num_layers: int, has_norms: bool
) -> ModelConfig:
    vocab_size, hidden_size = gpt["lm_head.weight"].shape
    num_heads = _num_heads(source, num_layers, hidden_size)
    patches = source.tensors[f"{TOKENIZER_PREFIX}encoder.proj1.weight"].shape[1]
    patch_px = round((patches / 3) ** 0.5)
    height_px, width_px = frame_size_px(source)
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=len(gpt["transformer.h.0.mlp.c_fc.weight"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=vocab_size,
        image_vocab_size=vocab_size - WHAMActions.num_ids,
        max_positions=len(gpt["transformer.wpe.weight"]),
        grid_height=-(-height_px // patch_px),
        grid_width=-(-width_px // patch_px),
        num_action_tokens=WHAMActions.num_tokens,
        norm="layer",
        norm_affine=has_norms,
        mlp="gelu",
        bias="transformer.h.0.attn.c_attn.bias" in gpt,
        position="learned",
        tie_embeddings=True,
    )


def _num_heads(source: Source, num_layers: int, hidden_size: int) -> int:
    predictor = source.hyper_parameters.get("predictor_args")
    keywords = predictor.get("pl_kwargs", {}) if isinstance(predictor, Record) else {}
    model_size = str((keywords.get("model_spec") or {}).get("model_size"))
    found = (
        source.side.get("n_head")
        or _HEADS_BY_NAME.get(model_size)
        or _HEADS_BY_SHAPE.get((num_layers, hidden_size))
    )
    if found is None:
        raise ValueError(
            f"nothing tells the number of heads of {num_layers} layers of width {hidden_size}: "
            'give a config file with {"n_head": ...}'
        )
    return int(found)


RELEASED = ReleasedFormat(("*.ckpt",), frozenset({"n_head"}), recognises, convert)
