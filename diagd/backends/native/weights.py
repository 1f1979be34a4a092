"""A model's weights as the kernels read them: in blocks, in huge pages where Linux gives them.

In small pages, which are looked up anew, a step of one lane takes a few percent more (dev/LOG.md).
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
ALIGNED = 64  # bytes, as the kernels read
MADV_HUGEPAGE = 14  # of Linux


class HugePages:
    """Where tensors that live and die together are put; what is never written takes no memory."""

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
    if sys.platform == "linux":  # refused, it lies in small ones
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return memory


NativeDType = Literal["float32", "bfloat16", "int8"]
PACKED: dict[str, int] = {"float32": 1, "bfloat16": 2, "int8": 4}  # in 4 bytes
MAX_DUOS, MAX_WEIGHT = 512, 2047  # csrc/integers.h
MAX_HEAD_DIM = 2**13  # each thread has room for hundreds of queries (csrc/attention.h)
CHECKED = 2**28  # activations of a step that are compared with the machine's memory
HIGHEST_GAIN = 3  # times the median: 1.6 at most in the bundled worlds, 14 in SmolLM2


def has_kernels(config: ModelConfig) -> bool:
    others = config.context_size or config.position_table or config.mlp == "exact_gelu"
    return not others and config.head_dim <= MAX_HEAD_DIM


def has_outliers(model: Transformer) -> bool:
    """Tell whether a gain of a norm stands out, as those of trained language models do.

    A row of activations with such a number, rounded to 7 bits, keeps little of the others. Largest
    and median are found by comparisons, so every processor tells the same.
    """
    norms: list[Any] = [model.model.norm]
    for block in model.model.blocks:
        norms += block.input_layernorm, block.post_attention_layernorm
    gains = [norm.weight.detach().float().abs() for norm in norms if norm.weight is not None]
    return any(bool(gain.amax() > HIGHEST_GAIN * gain.median()) for gain in gains)


class NativeWeights:
    """Copies of a model's weights in blocks, and the record that points to them, or ValueError.

    Args:
        block: columns of a block (csrc/kernels.h).
        use_up: empty each layer of the model once it is copied, so that both never are whole.
    """

    def __init__(
        self, model: Transformer, weights: NativeDType, block: int, use_up: bool = False
    ) -> None:
        self.config = config = model.config
        if not has_kernels(config):
            raise ValueError(
                "our kernels have no cross-attention, position table or exact GELU in MLPs, and "
                f"heads of at most {MAX_HEAD_DIM} numbers, got {config.head_dim}"
            )
        if weights == "int8" and (size := config.head_dim) > MAX_DUOS:
            raise ValueError(f"our kernels need head_dim <= {MAX_DUOS} in int8, got {size}")
        self.weights, self.use_up, self.block = weights, use_up, block
        # of embeddings, and of matrices unless they are rounded to int8
        self.dtype = torch.float32 if weights == "float32" else torch.bfloat16
        # of keys and values; whole numbers have a scale for each slot
        self.cache_dtype = torch.int16 if weights == "int8" else self.dtype
        # what models that share a cache must have in common
        self.cache_kind = config.num_layers, config.num_kv_heads, config.head_dim, self.cache_dtype
        self.weight_bytes = 4 // PACKED[weights]
        self._two_digits = weights == "int8" and has_outliers(model)  # while the model is whole
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
        attention, mlp = block.self_attn, block.mlp
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        up = (mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else (mlp.up_proj,)
        out, down = (attention.o_proj,), (mlp.down_proj,)
        products = {"qkv": qkv, "out": out, "gate_up": up, "down": down}
        norms = {
            "norm1": block.input_layernorm,
            "norm2": block.post_attention_layernorm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
        }
        found: dict[str, Tensor | None] = {}
        for name, parts in products.items():
            weights: list[Tensor] = [part.weight for part in parts]
            biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
            if name == "gate_up":  # each of the two begins with a block of its own
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
        """Put an (N, K) weight in blocks of outputs, padded with zeros: (N / block, K, block).

        Of narrower types, `PACKED` weights of an output stand together: (N / block, K / 2, block,
        2). Each block of int8 begins with what its sums begin with: activations are 64 too large.
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
