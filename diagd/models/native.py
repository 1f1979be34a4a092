"""Decode a Transformer with our own C++ kernels: one call a step, for CPUs.

At a few lanes a step, PyTorch spends more time between kernels than in them, and its float32
products of 2 to 16 rows reach a third of the memory bandwidth (docs/log.md). `NativeModel` runs all
layers in one call (`kernels/csrc/decoder.cpp`). Outputs do not depend on how many lanes share a step.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from diagd.kernels.compiler import load_library
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

NativeDType = Literal["float32", "bfloat16", "int8"]
BLOCK = 32  # columns of a block of weights, as in kernels/csrc/kernels.h


class NativeCache:
    """Keys as blocks of 32 slots, transposed, and values by slot; written by the kernels."""

    def __init__(
        self, config: ModelConfig, batch_size: int, num_slots: int, dtype: torch.dtype
    ) -> None:
        self.batch_size, self.num_slots = batch_size, num_slots
        heads, slots = batch_size * config.num_kv_heads, _ceil(num_slots)
        self.keys = [
            torch.zeros(heads * slots * config.head_dim, dtype=dtype)
            for _ in range(config.num_layers)
        ]
        self.values = [
            torch.zeros(heads * slots * _ceil(config.head_dim), dtype=dtype)
            for _ in range(config.num_layers)
        ]
        self.key_pointers, self.value_pointers = _pointers(self.keys), _pointers(self.values)

    @property
    def bytes(self) -> int:
        """Memory the buffers hold."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))


class NativeModel:
    """A `Transformer` behind the same protocol, on the CPU, its weights copied and packed.

    Activations are float32 whatever the weights are. int8 weights have one scale for each output
    (the largest magnitude becomes 127), a bfloat16 cache, and are for speed at some loss.
    """

    def __init__(self, model: Transformer, weights: NativeDType = "float32") -> None:
        """Pack the weights of a model.

        Raises:
            ValueError: Unknown `weights`.
            OSError: The kernels cannot be built here (see `load_library`).
        """
        if weights not in get_args(NativeDType):
            names = ", ".join(get_args(NativeDType))
            raise ValueError(f"weights must be one of {names}, got {weights!r}")
        self.config, self.weights = model.config, weights
        self.dtype = torch.float32 if weights == "float32" else torch.bfloat16
        self._library = load_library()
        suffix = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}[weights]
        self._decode = getattr(self._library, f"decode_{suffix}")
        self._kept: list[Tensor | ctypes.Array] = []  # what the C++ side points to
        self._model = self._describe(model)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def num_embeddings(self) -> int:
        """Ids that may be fed: [0, num_embeddings)."""
        return self.config.vocab_size + self.config.extra_embeddings

    @property
    def max_positions(self) -> int:
        """Longest sequence the model can hold."""
        return self.config.max_positions

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> NativeCache:
        """Allocate a cache of num_slots slots, the scratch slot (the last one) included."""
        if context is not None:
            raise ValueError("context must be None: this model has no cross-attention")
        if batch_size < 1 or num_slots < 1:
            raise ValueError(
                f"batch_size and num_slots must be at least 1, got {batch_size} and {num_slots}"
            )
        return NativeCache(self.config, batch_size, num_slots, self.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        cache: NativeCache,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Feed lanes; arguments as in `Transformer.forward`. Returns float32 logits."""
        batch, lanes = tokens.shape
        keep = min(logits_to_keep or lanes, lanes)
        logits = torch.empty(batch, keep, _ceil(self.vocab_size))
        inputs = tokens.contiguous(), positions.contiguous(), slots.contiguous()
        visible = visible.contiguous()
        step = _Step(
            *(batch, lanes, visible.shape[1], cache.num_slots, keep),
            *(tensor.data_ptr() for tensor in inputs),
            visible.data_ptr(),
            ctypes.addressof(cache.key_pointers),
            ctypes.addressof(cache.value_pointers),
            logits.data_ptr(),
        )
        self._model.threads = torch.get_num_threads()
        self._decode(ctypes.byref(self._model), ctypes.byref(step))
        return logits[..., : self.vocab_size]

    def sample(
        self,
        logits: Tensor,
        options: Any,
        ranges: Any,
        seeds: Tensor,
        frames: Tensor,
        rows: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """Draw as `diagd.decoding.sampling.sample` does, in one call (`csrc/sampler.cpp`)."""
        batch, lanes = logits.shape[:2]
        if ranges.by_place is None:
            bounds = torch.tensor([[ranges.low], [ranges.high]]).expand(2, lanes).contiguous()
        else:
            bounds = ranges.by_place[rows, columns].T.contiguous()
        drawn = torch.empty(batch, lanes, dtype=torch.int64)
        places = tuple(place.contiguous() for place in (seeds, frames, rows, columns))
        draw = _Draw(
            *(batch, lanes, logits.stride(1), torch.get_num_threads(), options.top_k or 0),
            *(options.temperature, 1.0 if options.top_p is None else options.top_p),
            *(logits.data_ptr(), bounds[0].data_ptr(), bounds[1].data_ptr()),
            *(place.data_ptr() for place in places),
            drawn.data_ptr(),
        )
        self._library.draw(ctypes.byref(draw))
        return drawn

    def _describe(self, model: Transformer) -> "_Model":
        config, stack = self.config, model.model
        layers = (_LayerWeights * config.num_layers)()
        for layer, target in zip(stack.layers, layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = attention.q_proj, attention.k_proj, attention.v_proj
            gated = config.mlp == "swiglu"
            up = (mlp.gate_proj, mlp.up_proj) if gated else (mlp.up_proj,)
            for name, parts in (
                ("qkv", qkv),
                ("out", (attention.o_proj,)),
                ("gate_up", up),
                ("down", (mlp.down_proj,)),
            ):
                if name == "gate_up":
                    weight = torch.cat([_pad(part.weight, 0) for part in parts])
                    biases = [_pad(part.bias, 0) for part in parts if part.bias is not None]
                else:
                    weight = torch.cat([part.weight for part in parts])
                    biases = [part.bias for part in parts if part.bias is not None]
                blocks, scale = self._matrix(weight)
                setattr(target, name, blocks)
                setattr(target, f"{name}_scale", scale)
                setattr(target, f"{name}_bias", self._floats(torch.cat(biases)) if biases else None)
            for name, module in (
                ("norm1", layer.input_layernorm),
                ("norm2", layer.post_attention_layernorm),
                ("q_norm", attention.q_norm),
                ("k_norm", attention.k_norm),
            ):
                setattr(target, name, self._floats(getattr(module, "weight", None)))
                if name in ("norm1", "norm2"):
                    bias = getattr(module, "bias", None)
                    setattr(target, f"{name}_bias", self._floats(bias))
        self._kept.append(layers)
        embeddings = stack.embed_tokens.weight
        head, head_scale = self._matrix(
            (embeddings[: config.vocab_size] if model.lm_head is None else model.lm_head.weight)
        )
        rotary = stack.rotary
        positions = stack.embed_positions
        return _Model(
            *(config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads),
            *(config.num_kv_heads, config.head_dim, config.vocab_size, config.norm == "rms"),
            *(config.mlp == "swiglu", 1, config.norm_eps),
            self._keep(_pad(embeddings.detach(), 1).to(self.dtype)),
            head,
            self._floats(None if positions is None else positions.weight, pad=False),
            self._floats(None if rotary is None else rotary.cos, pad=False),
            self._floats(None if rotary is None else rotary.sin, pad=False),
            self._floats(stack.norm.weight),
            self._floats(getattr(stack.norm, "bias", None)),
            head_scale,
            ctypes.addressof(layers),
        )

    def _matrix(self, weight: Tensor) -> tuple[int, int | None]:
        """Keep an (N, K) weight as blocks of 32 outputs, (N / 32, K, 32), both padded with zeros."""
        weight = _pad(_pad(weight.detach().float(), 0), 1)
        scale = None
        if self.weights == "int8":
            steps = weight.abs().amax(1).clamp(min=1e-12) / 127
            weight, scale = (weight / steps[:, None]).round(), self._keep(steps)
        dtype = torch.int8 if self.weights == "int8" else self.dtype
        blocks = weight.to(dtype).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()
        return self._keep(blocks), scale

    def _floats(self, values: Tensor | None, pad: bool = True) -> int | None:
        """Keep a float32 copy (padded to whole blocks); returns its address."""
        if values is None:
            return None
        values = values.detach().float()
        return self._keep(_pad(values, 0) if pad else values.clone())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor := tensor.contiguous())
        return tensor.data_ptr()


def _ceil(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _pad(tensor: Tensor, dim: int) -> Tensor:
    """Append zeros up to a whole number of blocks."""
    missing = _ceil(tensor.shape[dim]) - tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.detach(), tensor.new_zeros(shape)], dim=dim)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _LayerWeights(ctypes.Structure):
    _fields_ = _fields(
        ctypes.c_void_p,
        "qkv out gate_up down qkv_bias out_bias gate_up_bias down_bias "
        "qkv_scale out_scale gate_up_scale down_scale "
        "norm1 norm1_bias norm2 norm2_bias q_norm k_norm",
    )


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(
            ctypes.c_int32,
            "hidden intermediate layers heads kv_heads head_dim vocab rms gated threads",
        ),
        ("eps", ctypes.c_float),
        *_fields(
            ctypes.c_void_p,
            "embeddings head positions cosines sines norm norm_bias head_scale weights",
        ),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "batch lanes visible_slots num_slots keep"),
        *_fields(ctypes.c_void_p, "tokens at slots visible keys values logits"),
    ]


class _Draw(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "batch lanes stride threads top_k"),
        *_fields(ctypes.c_float, "temperature top_p"),
        *_fields(ctypes.c_void_p, "logits low high seeds frames rows columns drawn"),
    ]
