"""Hold keys and values of every layer in buffers that are allocated once and written by slot.

Slots may be written in any order, which is what out-of-order decoding needs. The last slot is
scratch: padded lanes write there and nobody looks.
"""

import math

import torch
from torch import Tensor

from diagd.memory import check_memory


def check_sizes(batch_size: int, num_slots: int) -> None:
    """Raise ValueError unless a cache of these sizes can be made."""
    if batch_size < 1 or num_slots < 1:
        raise ValueError(
            f"batch_size and num_slots must be at least 1, got {batch_size} and {num_slots}"
        )


def check_cache_fits(num_bytes: int, batch_size: int, num_slots: int) -> None:
    """Raise ValueError where a cache in this machine's memory could never be."""
    check_memory(num_bytes, f"a cache of batch_size={batch_size} and num_slots={num_slots}")


def refuse_context(context: Tensor | None) -> None:
    """Raise ValueError where a model without cross-attention is given something to attend to."""
    if context is not None:
        raise ValueError("context must be None: this model has no cross-attention")


# What cross-attention reads: a layer's keys and values, (B or 1, kv_heads, M, head_dim) each
Text = list[tuple[Tensor, Tensor]]


class StaticKVCache:
    """Keys and values, a pair of (B, num_kv_heads, num_slots, head_dim) buffers a layer."""

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        text: Text | None = None,
    ) -> None:
        """Allocate zeroed buffers; zeros keep a masked slot from turning 0 * NaN into NaN."""
        shape = (batch_size, num_kv_heads, num_slots, head_dim)
        if torch.device(device).type == "cpu":
            size = 2 * num_layers * math.prod(shape) * dtype.itemsize
            check_cache_fits(size, batch_size, num_slots)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.text = text

    def renew(self, text: Text | None) -> bool:
        """Empty the buffers and take another text in, where they stand; False where it differs."""
        theirs, own = _tensors_of(text), _tensors_of(self.text)
        if [tensor.shape for tensor in theirs] != [tensor.shape for tensor in own]:
            return False
        for buffer, tensor in zip(own, theirs, strict=True):
            buffer.copy_(tensor)
        for buffer in (*self.keys, *self.values):
            buffer.zero_()
        return True

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store (B, num_kv_heads, L, head_dim) states at slots (L,); only scratch may repeat."""
        self.keys[layer].index_copy_(2, slots, keys.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(2, slots, values.to(self.values[layer].dtype))

    def read(self, layer: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Return views of the first slots, each (B, num_kv_heads, num_slots, head_dim)."""
        return self.keys[layer][:, :, :num_slots], self.values[layer][:, :, :num_slots]


def _tensors_of(text: Text | None) -> list[Tensor]:
    return [tensor for pair in text or () for tensor in pair]
