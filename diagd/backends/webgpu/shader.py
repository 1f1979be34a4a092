"""The text of the shaders for a model's sizes, and its weights as they read them.

Everything here is text and bytes, so a browser can run the same.
"""

from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diagd.models.attention import SwiGLU
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

TILES = (1, 4, 16)  # rows that a workgroup multiplies at once
COLUMNS = 32  # columns of a tile, as in the shader
MAX_HEAD_DIM = 256  # threads of a workgroup
UNPACK = {  # four numbers as they are stored, and how they become float32
    torch.float32: "alias Packed = vec4f;\nfn unpack(w: vec4f) -> vec4f { return w; }",
    torch.float16: "alias Packed = vec2u;\nfn unpack(w: vec2u) -> vec4f "
    "{ return vec4f(unpack2x16float(w.x), unpack2x16float(w.y)); }",
    torch.bfloat16: "alias Packed = vec2u;\nfn unpack(w: vec2u) -> vec4f { return "
    "bitcast<vec4f>(vec4u(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u)); }",
}


def check_shape(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ValueError where the shaders cannot run a model."""
    if config.context_size or config.position_table:
        raise ValueError("backend webgpu has no cross-attention and no position table")
    if config.head_size or config.head_norm:
        raise ValueError("backend webgpu has no layer before the output layer, no norms by head")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % 4:
            size = getattr(config, name)
            raise ValueError(f"backend webgpu needs {name} to be a multiple of 4, got {size}")
    if config.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"backend webgpu needs head_dim to be at most {MAX_HEAD_DIM}, got {config.head_dim}"
        )
    if dtype not in UNPACK:
        raise ValueError(f"backend webgpu has no weights in {dtype}")


def shader_of(config: ModelConfig, dtype: torch.dtype, rows: int) -> str:
    """Return the whole text for weights of a dtype and tiles of so many rows."""
    sizes = {
        "ROWS": rows,
        "HIDDEN": config.hidden_size,
        "INTERMEDIATE": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "VOCAB": config.vocab_size,
    }
    kinds = {
        "LAYER_NORM": config.norm == "layer",
        "GATED": config.mlp == "swiglu",
        "QK_NORM": config.qk_norm,
        "LEARNED": config.position == "learned",
    }
    header = [f"const {name} = {size}u;" for name, size in sizes.items()]
    header += [f"const {name} = {str(kind).lower()};" for name, kind in kinds.items()]
    header += [f"const EPS = {config.norm_eps:.9e};", UNPACK[dtype]]
    text = files("diagd.backends.webgpu").joinpath("decoder.wgsl").read_text(encoding="utf-8")
    return "\n".join([*header, text])


class Weights(NamedTuple):
    """What one dispatch multiplies with."""

    matrix: Tensor  # (K / 4, N, 4): four weights of an output stand together
    vector: Tensor  # float32, what is added, and more (see the shader)


def weights_of(model: Transformer) -> dict[str, Weights]:
    """Return the weights of each kind of dispatch; those of layers are called `attend 0`."""
    stack, config = model.model, model.config
    table = stack.embed_positions
    embeddings = stack.embed_tokens.weight.detach()
    output = embeddings[: config.vocab_size] if model.lm_head is None else model.lm_head.weight
    packed = {
        "embed": Weights(embeddings, _one() if table is None else table.weight.detach().float()),
        "predict": _folded(stack.norm, output.detach(), None, model.dtype),
    }
    for index, block in enumerate(stack.blocks):
        attention, mlp = block.self_attn, block.mlp
        up = (mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else (mlp.up_proj,)
        heads = attention.q_proj, attention.k_proj, attention.v_proj
        project = _normed(block.input_layernorm, heads, model.dtype)
        norms = [
            norm.weight.detach().float()
            for norm in (attention.q_norm, attention.k_norm)
            if norm is not None
        ]
        expand = _normed(block.post_attention_layernorm, up, model.dtype)
        out, down = attention.o_proj, mlp.down_proj
        packed |= {
            f"project {index}": project._replace(vector=torch.cat([project.vector, *norms])),
            f"attend {index}": Weights(_packed(out.weight.detach(), model.dtype), _one()),
            f"expand {index}": expand._replace(vector=torch.cat([_bias(out), expand.vector])),
            f"contract {index}": Weights(_packed(down.weight.detach(), model.dtype), _bias(down)),
        }
    return packed


def _normed(norm: nn.Module, linears: tuple[nn.Linear, ...], dtype: torch.dtype) -> Weights:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return _folded(norm, weight, torch.cat([_bias(linear) for linear in linears]), dtype)


def _folded(norm: nn.Module, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Weights:
    """Fold the weight and the bias of a norm into the matrix (N, K) that follows it."""
    weight = weight.float()
    vector = weight.new_zeros(len(weight)) if bias is None else bias
    scale, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if shift is not None:
        vector = vector + weight @ shift.detach().float()
    if scale is not None:
        weight = weight * scale.detach().float()
    return Weights(_packed(weight, dtype), vector)


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.unflatten(1, (-1, 4)).transpose(0, 1).to(dtype).contiguous()


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return torch.zeros(linear.out_features)
    return linear.bias.detach().float()


def _one() -> Tensor:
    return torch.zeros(1)
