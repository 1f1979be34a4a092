"""The source of the shaders for a model's sizes, and its weights in their format.

Everything here is text and bytes, so browsers can run it as well.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diagd.backends.linears import round_to_int8
from diagd.models.attention import SwiGLU
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

UNIFORM = 256  # bytes between the records of steps, supported by every device
# The two bind groups of all shaders: one per stream, one per dispatch.
SHARED = {"tasks": "uniform", "lanes": "read-only-storage", "memory": "storage", "arena": "storage"}
OWN = {"matrix": "read-only-storage", "vector": "read-only-storage", "cache": "storage"}
TILES = (1, 4, 16)  # rows multiplied at once by a workgroup
COLUMNS = 32  # columns of a tile, as in the shader
MAX_HEAD_DIM = 256  # threads of a workgroup
_BFLOAT16 = (
    "(w: vec2u) -> vec4f { return "
    "bitcast<vec4f>(vec4u(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u)); }"
)
_AS_WEIGHTS = "\nfn embedded(at: u32) -> vec4f { return unpack(matrix[at]); }"
UNPACK = {  # four stored numbers, and their conversion to float32; also for embeddings
    torch.float32: "alias Packed = vec4f;\nfn unpack(w: vec4f) -> vec4f { return w; }"
    + _AS_WEIGHTS,
    torch.float16: "alias Packed = vec2u;\nfn unpack(w: vec2u) -> vec4f "
    "{ return vec4f(unpack2x16float(w.x), unpack2x16float(w.y)); }" + _AS_WEIGHTS,
    torch.bfloat16: f"alias Packed = vec2u;\nfn unpack{_BFLOAT16}{_AS_WEIGHTS}",
    torch.int8: "alias Packed = u32;\nfn unpack(w: u32) -> vec4f { return "
    "vec4f(bitcast<vec4i>(vec4u(w << 24u, w << 16u, w << 8u, w)) >> vec4u(24u)); }"
    f"\nfn widen{_BFLOAT16}"
    "\nfn embedded(at: u32) -> vec4f "
    "{ return widen(vec2u(matrix[2u * at], matrix[2u * at + 1u])); }",
}


def check_shape(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ValueError if the shaders do not support a model."""
    if config.context_size or config.position_table:
        raise ValueError("backend webgpu does not support cross-attention or a position table")
    if config.post_norms or config.visual_mlp_layers:
        raise ValueError("backend webgpu does not support norms behind layers or a second MLP")
    if config.mlp == "exact_gelu":
        raise ValueError("backend webgpu does not support exact GELU in MLPs")
    if config.head_size or config.head_norm:
        raise ValueError("backend webgpu does not support head_size or head_norm")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if (size := getattr(config, name)) % 4:
            raise ValueError(f"backend webgpu needs {name} to be a multiple of 4, got {size}")
    if (size := config.head_dim) > MAX_HEAD_DIM:
        raise ValueError(f"backend webgpu needs head_dim to be at most {MAX_HEAD_DIM}, got {size}")
    if dtype not in UNPACK:
        raise ValueError(f"backend webgpu does not support weights in {dtype}")


def shader_of(config: ModelConfig, dtype: torch.dtype) -> str:
    """Return the source for weights of a dtype; `ROWS` of a tile is left out."""
    sizes = {
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
        "INT8": dtype == torch.int8,
    }
    header = [f"const {name} = {size}u;" for name, size in sizes.items()]
    header += [f"const SLIDING_WINDOW = {config.sliding_window};"]
    header += [f"const {name} = {str(kind).lower()};" for name, kind in kinds.items()]
    header += [f"const EPS = {config.norm_eps:.9e};", UNPACK[dtype]]
    text = files("diagd.backends.webgpu").joinpath("decoder.wgsl").read_text(encoding="utf-8")
    return "\n".join([*header, text])


class Dispatch(NamedTuple):
    entry: str
    weights: str
    groups: tuple[int | str, int | str]  # numbers, the `rows` of a step, `tiles` of all or `kept`


def dispatches_of(config: ModelConfig) -> list[Dispatch]:
    """Return the dispatches of a step, in order; the last one samples."""
    sizes = config.intermediate_size, config.hidden_size, config.vocab_size
    inner, hidden, vocab = (-(-size // COLUMNS) for size in sizes)
    heads = config.num_heads + 2 * config.num_kv_heads
    found = [Dispatch("embed", "embed", ("rows", 1))]
    for layer in range(config.num_layers):
        attend = "attend_sliding" if layer in config.sliding_layers else "attend"
        found += [
            Dispatch("project", f"project {layer}", (heads, "tiles")),
            Dispatch(attend, f"attend {layer}", ("rows", config.num_heads)),
            Dispatch("expand", f"expand {layer}", (inner, "tiles")),
            Dispatch("contract", f"contract {layer}", (hidden, "tiles")),
        ]
    predict = Dispatch("predict", "predict", (vocab, "kept"))
    return [*found, predict, Dispatch("draw", "predict", ("rows", 1))]


def row_floats(config: ModelConfig) -> int:
    """Return the floats of activations per row; logits come last."""
    projected = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    stream = (2 + config.num_heads) * config.hidden_size
    return stream + projected + config.intermediate_size + config.vocab_size


class Weights(NamedTuple):  # of one dispatch
    matrix: Tensor  # (K / 4, N, 4): four weights of an output are adjacent
    vector: Tensor  # float32, added to the product, and more (see the shader)


def weights_of(model: Transformer, dtype: torch.dtype) -> dict[str, Weights]:
    """Return the weights of each kind of dispatch; those of layers are called `attend 0`.

    In int8, embeddings are bfloat16, and each column of a matrix has a scale.
    """
    stack, config = model.model, model.config
    table = stack.embed_positions
    embeddings = stack.embed_tokens.weight.detach()
    output = embeddings[: config.vocab_size] if model.lm_head is None else model.lm_head.weight
    packed = {
        "embed": Weights(
            embeddings.to(torch.bfloat16 if dtype == torch.int8 else dtype),
            torch.zeros(1) if table is None else table.weight.detach().float(),
        ),
        "predict": _product(dtype, output, torch.zeros(config.vocab_size), stack.norm),
    }
    for index, block in enumerate(stack.blocks):
        attention, mlp = block.self_attn, block.mlp
        up = (mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else (mlp.up_proj,)
        heads = attention.q_proj, attention.k_proj, attention.v_proj
        norms = (attention.q_norm, attention.k_norm)
        after = [weight.detach().float() for norm in norms for weight in norm.parameters()]
        out, down = attention.o_proj, mlp.down_proj
        first, second = block.input_layernorm, block.post_attention_layernorm
        packed |= {
            f"project {index}": _product(dtype, *_joined(heads), first, after=after),
            f"attend {index}": _product(dtype, out.weight, torch.zeros(0)),
            f"expand {index}": _product(dtype, *_joined(up), second, before=[_bias(out)]),
            f"contract {index}": _product(dtype, down.weight, _bias(down)),
        }
    return packed


def _joined(linears: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor]:
    return torch.cat([one.weight for one in linears]), torch.cat([_bias(one) for one in linears])


def _product(
    dtype: torch.dtype,
    weight: Tensor,
    bias: Tensor,
    norm: nn.Module | None = None,
    before: Sequence[Tensor] = (),
    after: Sequence[Tensor] = (),
) -> Weights:
    """Pack a matrix (N, K), and fold the bias of the norm before it into its own bias.

    The norm's weight is folded into the matrix, or in int8 stored after its scales.
    """
    weight = weight.detach().float()
    gains, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    gains = torch.ones_like(weight[0]) if gains is None else gains.detach().float()
    tail: list[Tensor] = []
    packed = weight * gains
    if dtype == torch.int8:
        packed, scales = round_to_int8(weight)
        weight = packed * scales[:, None]
        tail = [scales] if norm is None else [scales, gains]
    if shift is not None:
        bias = bias + weight @ shift.detach().float()
    vector = torch.cat([*before, bias, *after, *tail])
    packed = packed.to(dtype).unflatten(1, (-1, 4)).transpose(0, 1).contiguous()
    return Weights(packed, vector if len(vector) else torch.zeros(1))


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return torch.zeros(linear.out_features)
    return linear.bias.detach().float()


def describe_shaders(model: Transformer, places: dict[str, int]) -> tuple[dict[str, Any], bytes]:
    """Return the input of webgpu.js besides the kernels, and the vectors of all weights.

    The kernels choose the lanes of a frame (native/csrc/wasm/world.cpp); 8-bit matrices are read
    from the world's file, starting at `places`, in blocks (native/weights.py).
    """
    config = model.config
    check_shape(config, torch.int8)
    vectors, weights = [], []
    for name, (matrix, vector) in weights_of(model, torch.int8).items():
        shape: list[Any] = list(matrix.shape)  # in bfloat16 embeddings, a row per id
        if name != "embed":
            is_two = name.startswith("expand") and config.mlp == "swiglu"  # halves padded to blocks
            shape = [4 * len(matrix), [matrix.shape[1] // 2] * 2 if is_two else [matrix.shape[1]]]
        weights.append([name, places[name], shape, len(vector)])
        vectors.append(vector)
    description = {
        "code": shader_of(config, torch.int8),
        "tiles": TILES,
        "uniform": UNIFORM,
        "bindings": [list(SHARED.values()), list(OWN.values())],
        "dispatches": dispatches_of(config),
        "weights": weights,
        "layers": config.num_layers,
        "row_floats": row_floats(config),
        "slot_floats": 2 * config.num_kv_heads * config.head_dim,
    }
    return description, bytes_of(torch.cat(vectors))
