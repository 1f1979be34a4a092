"""Weights of 8 bits for linear layers that PyTorch multiplies: on CUDA, whichever backend runs.

A weight is an integer of 8 bits times the scale of its output. PyTorch widens the integers where it
multiplies them, so they take half of bfloat16's memory; whether a step is faster is another matter
(docs/gpu.md). docs/log.md says why no library and no kernel of PyTorch's does it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagd.backends.devices import choose_dtype, dtype_of
from diagd.backends.merged_linears import MergedLinear
from diagd.models.transformer import Transformer


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of a matrix, each by a scale of its own.

    Args:
        weight: (N, K) float32.

    Returns:
        (N, K) int8, and (N,) float32 scales: the largest magnitude of a row becomes 127.
    """
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


class Int8Linear(nn.Module):
    """A linear layer, its weight rounded."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear | MergedLinear) -> None:
        super().__init__()
        assert layer.weight is not None
        # no buffers: scales stay float32 when a model is cast
        self.weight, self.scales = round_to_int8(layer.weight.detach().float())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N)."""
        out = (F.linear(x, self.weight.to(x.dtype)) * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias


def int8_companion(device: torch.device) -> torch.dtype:
    """Return the type of all but the rounded weights: bfloat16 where the device multiplies it.

    Never float16, in which sums over 8-bit integers would overflow.
    """
    return dtype_of(choose_dtype("auto", device))


def round_linears(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Round a model's linear layers, in place, one after another, and cast what remains.

    A tied output layer stays as it is: it is the embedding table.

    Args:
        model: after `merge_linears`, or without, not packed.
        dtype: of what remains (see `int8_companion`).

    Returns:
        The same model, for inference only.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | MergedLinear):
                setattr(module, name, Int8Linear(child))
    return model.to(dtype).requires_grad_(False)
