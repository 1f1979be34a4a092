"""A model's weights in the kernels' format: in blocks, in huge pages if Linux provides them.

Small pages cost a step of one lane a few percent, in address translation (dev/LOG.md).
"""

import ctypes
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diagd.backends.linears import round_to_int8
from diagd.backends.native.boundary import POINTER, LayerRecord, ModelRecord, Record
from diagd.models.attention import SwiGLU
from diagd.models.config import ModelConfig
from diagd.models.transformer import Block, Transformer
from diagd.system import check_memory

PAGE = 2**21  # bytes
CHUNK = 32 * PAGE
ALIGNED = 64  # bytes, as the kernels require
MADV_HUGEPAGE = 14  # of Linux


class HugePages:
    """Memory for tensors with one lifetime; untouched parts take no memory."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        size = -(-tensor.nbytes // ALIGNED) * ALIGNED
        if size > len(self._free):
            self._free = _chunk(max(size, CHUNK))
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _chunk(size: int) -> Tensor:
    size = -(-size // PAGE) * PAGE
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][:size]
    if sys.platform == "linux":  # if Linux refuses, small pages are used
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return memory


NativeDType = Literal["float32", "bfloat16", "int8"]
PACKED: dict[str, int] = {"float32": 1, "bfloat16": 2, "int8": 4}  # weights in 4 bytes
MAX_DUOS, MAX_WEIGHT = 512, 2047  # csrc/integers.h
MAX_HEAD_DIM = 2**13  # buffers of a thread hold hundreds of queries (csrc/attention.h)
CHECKED = 2**28  # activations of a step above which memory is checked
HIGHEST_GAIN = 3  # times the median: 1.6 at most in the bundled worlds, 14 in SmolLM2


def has_kernels(config: ModelConfig) -> bool:
    others = config.context_size or config.position_table
    return not others and config.mlp != "exact_gelu" and config.head_dim <= MAX_HEAD_DIM


def has_outliers(model: Transformer) -> bool:
    """Return whether some gain of a norm stands out, as in trained language models.

    A row of activations with such a value keeps little of the others in 7 bits. Maximum and median
    are found by comparisons, so the result is the same on all processors.
    """
    norms: list[Any] = [model.model.norm]
    for block in model.model.blocks:
        norms += block.input_layernorm, block.post_attention_layernorm
    gains = [norm.weight.detach().float().abs() for norm in norms if norm.weight is not None]
    return any(bool(gain.amax() > HIGHEST_GAIN * gain.median()) for gain in gains)


class NativeWeights:
    """Copies of a model's weights in blocks, and the record that points to them; or ValueError.

    Args:
        block: columns of a block (csrc/kernels.h).
        use_up: empty each layer of the model after copying it, so that two copies never coexist.
    """

    def __init__(
        self, model: Transformer, weights: NativeDType, block: int, use_up: bool = False
    ) -> None:
        self.config = config = model.config
        if not has_kernels(config):
            raise ValueError(
                "native kernels do not support cross-attention, position tables, exact GELU in "
                f"MLPs or head_dim above {MAX_HEAD_DIM}, got {config.head_dim}"
            )
        if weights == "int8" and (size := config.head_dim) > MAX_DUOS:
            raise ValueError(f"native int8 kernels need head_dim <= {MAX_DUOS}, got {size}")
        self.weights, self.use_up, self.block = weights, use_up, block
        # of embeddings, and of matrices unless they are quantized to int8
        self.dtype = torch.float32 if weights == "float32" else torch.bfloat16
        # of keys and values; integers have a scale for each slot
        self.cache_dtype = torch.int16 if weights == "int8" else self.dtype
        # must be equal for models that share a cache
        self.cache_kind = config.num_layers, config.num_kv_heads, config.head_dim, self.cache_dtype
        self.weight_bytes = 4 // PACKED[weights]
        self._two_digits = weights == "int8" and has_outliers(model)  # before the model is emptied
        self._pages = HugePages()
        self.layers = [self._layer(block) for block in model.model.blocks]
        self.record = self._record(model)

    def check_room(self, batch: int, lanes: int, slots: int, threads: int) -> None:
        """Raise ValueError for a step whose activations exceed this machine's memory."""
        config, width = self.config, self.config.num_heads * self.config.head_dim
        inner = max(2 * config.intermediate_size, config.head_size)
        row = (threads + 1) * config.hidden_size + 4 * width + inner + config.vocab_size
        if (numbers := batch * lanes * row + 2 * lanes * slots) > CHECKED:
            check_memory(4 * numbers, f"a step of {batch} x {lanes} lanes")

    def _layer(self, block: Block) -> Record:
        attention = block.self_attn
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        products: dict[str, tuple[nn.Linear, ...]] = {"qkv": qkv, "out": (attention.o_proj,)}
        for prefix, mlp in (("", block.mlp), ("visual_", block.visual_mlp)):
            if mlp is not None:
                up = (mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else (mlp.up_proj,)
                products |= {f"{prefix}gate_up": up, f"{prefix}down": (mlp.down_proj,)}
        norms = {
            "norm1": block.input_layernorm,
            "norm2": block.post_attention_layernorm,
            "post1": block.post_self_attn_layernorm,
            "post2": block.post_mlp_layernorm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
        }
        found: dict[str, Tensor | None] = {}
        for name, parts in products.items():
            weights: list[Tensor] = [part.weight for part in parts]
            biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
            if name.endswith("gate_up"):  # each half begins a new block
                weights = [self._pad(weight, 0) for weight in weights]
                biases = [self._pad(bias, 0) for bias in biases]
            found[name], found[f"{name}_scale"] = self._matrix(torch.cat(weights))
            found[f"{name}_bias"] = self._vector(torch.cat(biases)) if biases else None
        for name, norm in norms.items():
            found[name] = self._part(norm, "weight")
            found[f"{name}_bias"] = self._part(norm, "bias")
        if self.use_up:
            for parameter in block.parameters():
                parameter.data = parameter.data.new_empty(0)
        return LayerRecord(slides=attention.layer in self.config.sliding_layers, **found)

    def _record(self, model: Transformer) -> Record:
        config, stack = self.config, model.model
        embeddings = stack.embed_tokens.weight
        output = embeddings[: config.vocab_size] if model.lm_head is None else model.lm_head.weight
        head, head_scale = self._matrix(output)
        proj = model.head_proj
        head_proj, head_proj_scale = (None, None) if proj is None else self._matrix(proj.weight)
        rotary, positions = stack.rotary, stack.embed_positions
        pairs: Any = ModelRecord._fields_
        names = [name for name, kind in pairs if kind is not POINTER]
        values = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return ModelRecord(
            **values,
            rms=config.norm == "rms",
            gated=config.mlp == "swiglu",
            num_embeddings=len(embeddings),
            two_digits=self._two_digits,
            embeddings=self._pages.put(self._pad(embeddings, 1).to(self.dtype)),
            head=head,
            positions=None if positions is None else self._pages.put(positions.weight.float()),
            frequencies=None if rotary is None else self._pages.put(rotary.frequencies),
            axes=None if rotary is None else self._pages.put(rotary.axes),
            norm=self._part(stack.norm, "weight"),
            norm_bias=self._part(stack.norm, "bias"),
            head_scale=head_scale,
            head_bias=self._part(model.lm_head, "bias"),
            head_proj=head_proj,
            head_proj_scale=head_proj_scale,
            head_proj_bias=self._part(proj, "bias"),
            weights=(LayerRecord * config.num_layers)(*self.layers),
        )

    def _matrix(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pack an (N, K) weight in blocks of outputs, padded with zeros: (N / block, K, block).

        In narrower types, `PACKED` weights of an output are adjacent: (N / block, K / 2, block, 2).
        Each
        block of int8 starts with the initial values of its sums: activations are 64 too large.
        """
        is_int8, packed = self.weights == "int8", PACKED[self.weights]
        weight = self._pad(self._pad(weight.detach().float(), 0), 1, 64 if is_int8 else self.block)
        scales = None
        if is_int8:
            weight, scales = round_to_int8(weight)
            scales = self._pages.put(scales)
        dtype = torch.int8 if is_int8 else self.dtype
        blocks = weight.to(dtype).unflatten(0, (-1, self.block)).unflatten(2, (-1, packed))
        blocks = blocks.transpose(1, 2)
        if is_int8:
            first = -64 * weight.sum(1, dtype=torch.int32)
            first = first.view(torch.int8).view(-1, 1, self.block, packed)
            blocks = torch.cat([first, blocks], 1)
        return self._pages.put(blocks), scales

    def _part(self, module: nn.Module | None, name: str) -> Tensor | None:
        values = getattr(module, name, None)
        return None if values is None else self._vector(values)

    def _vector(self, values: Tensor) -> Tensor:
        return self._pages.put(self._pad(values.float(), 0))

    def _pad(self, tensor: Tensor, dim: int, whole: int | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = -shape[dim] % (whole or self.block)
        return torch.cat([tensor.detach(), tensor.new_zeros(shape)], dim=dim)
