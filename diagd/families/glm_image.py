"""GLM-Image's first stage, a GLM that writes a preview and then a picture.

Blocks have four norms; half of each head is rotated, by frame, row and column in sections. Our
rotary pairs are (i, i + D / 2), so heads are reordered: pairs that are not rotated come last. The
vision encoder for source pictures is skipped here; `diagd.GlmImage` loads it.
"""

import torch
from torch import Tensor

from diagd.checks import brief
from diagd.families.defaults import image_defaults
from diagd.families.family import Family, Source
from diagd.families.presets import GLM_IMAGE as PRESETS
from diagd.families.weights import llama_fields, with_biases
from diagd.models.config import ModelConfig
from diagd.weight_files import tensors_under

_USUAL = PRESETS["glm-image-9b"]


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side = source.side
    if not (text := side.get("text_config")):
        raise ValueError("expected a config.json beside it that has text_config")
    language = tensors_under("model.language_model.", source.tensors)
    theirs = {f"model.{name}": tensor for name, tensor in language.items()}
    theirs["lm_head.weight"] = source.tensors["lm_head.weight"]
    rope = text.get("rope_parameters") or {}
    sections = tuple(rope.get("mrope_section", _USUAL.rotary_sections))
    weights = dict[str, Tensor]()
    for name, tensor in theirs.items():
        module, _, kind = name.rpartition(".")
        if module.endswith("gate_up_proj"):
            layer = module.removesuffix("gate_up_proj")
            weights[f"{layer}gate_proj.{kind}"], weights[f"{layer}up_proj.{kind}"] = tensor.chunk(2)
        else:
            weights[name] = tensor
    fields = llama_fields(weights, text, _USUAL)
    fields["bias"], head_dim, turning = True, fields["head_dim"], 2 * sum(sections)
    share = rope.get("partial_rotary_factor", turning / head_dim)
    if int(share * head_dim) != turning:
        expected = f"{turning} of {head_dim} numbers of a head, as in mrope_section"
        raise ValueError(f"partial_rotary_factor must rotate {expected}, got {brief(share)}")
    order = _order(head_dim, sum(sections))
    for name, tensor in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensor.unflatten(0, (-1, head_dim))
            weights[name] = heads[:, order].flatten(0, 1)
    config = ModelConfig(
        **fields,
        image_vocab_size=int((side.get("vq_config") or {}).get("num_embeddings", 16384)),
        position="mrope",
        rotary_sections=sections,
        post_norms=True,
        grid_height=_USUAL.grid_height,
        grid_width=_USUAL.grid_width,
    )
    return config, with_biases(weights)


def _order(head_dim: int, num_turning: int) -> Tensor:
    """Return where each number of our heads (head_dim,) stands in theirs."""
    turning, half = torch.arange(num_turning), head_dim // 2
    still = torch.arange(2 * num_turning, head_dim)
    first, second = still.split([half - num_turning, half - num_turning])
    return torch.cat([turning, first, turning + num_turning, second])


GLM_IMAGE = Family(
    name="GLM-Image",
    licence="code and weights: MIT",
    signature=("model.language_model.layers.0.post_self_attn_layernorm.weight",),
    convert=_convert,
    defaults=lambda found: image_defaults(temperature=0.9, top_p=0.75),
)
