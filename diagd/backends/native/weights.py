"""A model's weights as the kernels read them: in blocks, in huge pages where Linux gives them.

Reading all weights at every step goes through thousands of small pages, most of which are looked up
anew; in huge ones a step of one lane takes a few percent less (docs/log.md).
"""

import ctypes
import sys
from typing import Literal

import torch
from torch import Tensor, nn

from diagd.backends.linears import round_to_int8
from diagd.backends.native.boundary import LayerRecord, ModelRecord
from diagd.models.attention import SwiGLU
from diagd.models.rotary import first_grid_token
from diagd.models.transformer import Transformer

PAGE = 2**21  # bytes
CHUNK = 32 * PAGE
ALIGNED = 64  # bytes, as the kernels read
MADV_HUGEPAGE = 14  # of Linux


class HugePages:
    """Where tensors that live and die together are put one after the other.

    Memory is asked of the system in chunks; what is never written takes none.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor, here."""
        place = self._take(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return place.view(tensor.shape).copy_(tensor)

    def _take(self, count: int) -> Tensor:
        size = -(-count // ALIGNED) * ALIGNED
        if size > len(self._free):
            self._free = _chunk(max(size, CHUNK))
        taken, self._free = self._free[:count], self._free[size:]
        return taken


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


class NativeWeights:
    """Copies of a model's weights in blocks, and the record that points to them.

    Args:
        block: columns of a block (csrc/kernels.h).
        use_up: empty each layer of the model once it is copied, so that both never are whole.
    """

    def __init__(
        self, model: Transformer, weights: NativeDType, block: int, use_up: bool = False
    ) -> None:
        self.config, self.weights, self.use_up, self.block = model.config, weights, use_up, block
        # of embeddings, and of matrices unless they are rounded to int8
        self.dtype = torch.float32 if weights == "float32" else torch.bfloat16
        # of keys and values; whole numbers have a scale for each slot
        self.cache_dtype = torch.int16 if weights == "int8" else self.dtype
        self.weight_bytes = 4 // PACKED[weights]
        self._kept: list[Tensor | ctypes.Array] = []  # what the record points to
        self._pages = HugePages()
        self.record = self._describe(model)  # valid as long as this object lives

    def at(self, address: int) -> Tensor | ctypes.Array:
        """Return what a pointer of the record points to."""
        return next(
            one
            for one in self._kept
            if address == (one.data_ptr() if isinstance(one, Tensor) else ctypes.addressof(one))
        )

    def _describe(self, model: Transformer) -> ModelRecord:
        config, stack = self.config, model.model
        layers = (LayerRecord * config.num_layers)()
        for layer, target in zip(stack.blocks, layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = attention.q_proj, attention.k_proj, attention.v_proj
            up = (mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else (mlp.up_proj,)
            for name, parts in (
                ("qkv", qkv),
                ("out", (attention.o_proj,)),
                ("gate_up", up),
                ("down", (mlp.down_proj,)),
            ):
                weights: list[Tensor] = [part.weight for part in parts]
                biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
                if name == "gate_up":  # each of the two begins with a block of its own
                    weights = [self._pad(weight, 0) for weight in weights]
                    biases = [self._pad(bias, 0) for bias in biases]
                blocks, scale = self._matrix(torch.cat(weights))
                setattr(target, name, blocks)
                setattr(target, f"{name}_scale", scale)
                setattr(target, f"{name}_bias", self._floats(torch.cat(biases)) if biases else None)
            first, second = layer.input_layernorm, layer.post_attention_layernorm
            target.norm1, target.norm1_bias = self._weight_of(first), self._bias_of(first)
            target.norm2, target.norm2_bias = self._weight_of(second), self._bias_of(second)
            for name in ("q_norm", "k_norm"):
                norm = getattr(attention, name)
                setattr(target, name, self._weight_of(norm))
                setattr(target, f"{name}_bias", self._bias_of(norm))
            if self.use_up:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.new_empty(0)
        self._kept.append(layers)
        embeddings = stack.embed_tokens.weight
        head, head_scale = self._matrix(
            embeddings[: config.vocab_size] if model.lm_head is None else model.lm_head.weight
        )
        proj = model.head_proj
        head_proj, head_proj_scale = (None, None) if proj is None else self._matrix(proj.weight)
        rotary = stack.rotary
        positions = stack.embed_positions
        return ModelRecord(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            rms=config.norm == "rms",
            gated=config.mlp == "swiglu",
            num_embeddings=len(embeddings),
            max_positions=config.max_positions,
            prefix=first_grid_token(config),
            actions=config.num_action_tokens,
            grid_width=config.grid_width if config.position in ("rope2d", "rope3d") else 0,
            grid_tokens=config.tokens_per_frame,
            head_size=config.head_size,
            eps=config.norm_eps,
            embeddings=self._keep(self._pad(embeddings.detach(), 1).to(self.dtype)),
            head=head,
            positions=self._floats(None if positions is None else positions.weight, pad=False),
            frequencies=None if rotary is None else self._keep(rotary.frequencies),
            axes=None if rotary is None else self._keep(rotary.axes),
            norm=self._weight_of(stack.norm),
            norm_bias=self._bias_of(stack.norm),
            head_scale=head_scale,
            head_bias=self._bias_of(model.lm_head),
            head_proj=head_proj,
            head_proj_scale=head_proj_scale,
            head_proj_bias=self._bias_of(proj),
            weights=ctypes.addressof(layers),
        )

    def _matrix(self, weight: Tensor) -> tuple[int, int | None]:
        """Keep an (N, K) weight in blocks of outputs, padded with zeros: (N / block, K, block).

        Of narrower types, `PACKED` weights of an output stand together: (N / block, K / 2, block,
        2). Each block of int8 begins with what its sums begin with: activations are 64 too large.
        """
        packed = PACKED[self.weights]
        whole = 64 if self.weights == "int8" else self.block
        weight = self._pad(self._pad(weight.detach().float(), 0), 1, whole)
        scale = None
        if self.weights == "int8":
            weight, scales = round_to_int8(weight)
            scale = self._keep(scales)
        dtype = torch.int8 if self.weights == "int8" else self.dtype
        blocks = weight.to(dtype).unflatten(0, (-1, self.block)).unflatten(2, (-1, packed))
        blocks = blocks.transpose(1, 2)
        if self.weights == "int8":
            first = -64 * weight.sum(1, dtype=torch.int32)
            first = first.view(torch.int8).view(-1, 1, self.block, packed)
            blocks = torch.cat([first, blocks], 1)
        return self._keep(blocks), scale

    def _weight_of(self, norm: nn.Module | None) -> int | None:
        return self._floats(getattr(norm, "weight", None))

    def _bias_of(self, module: nn.Module | None) -> int | None:
        return self._floats(getattr(module, "bias", None))

    def _floats(self, values: Tensor | None, pad: bool = True) -> int | None:
        if values is None:
            return None
        values = values.detach().float()
        return self._keep(self._pad(values, 0) if pad else values)

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor := self._pages.put(tensor))
        return tensor.data_ptr()

    def _pad(self, tensor: Tensor, dim: int, whole: int | None = None) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = -shape[dim] % (whole or self.block)
        return torch.cat([tensor.detach(), tensor.new_zeros(shape)], dim=dim)
