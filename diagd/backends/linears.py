"""Merge a model's matrix products for decoding with PyTorch's kernels, and pack them on the CPU.

Steps with few lanes are limited by reading weights and by the number of calls. On the CPU
`F.linear` reorders a weight for oneDNN in every call; packing does it once (dev/LOG.md). Inference
only.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagd.backends.devices import multiplies_bfloat16
from diagd.models.transformer import Transformer


def can_pack(model: Transformer) -> bool:
    return model.device.type == "cpu" and multiplies_packed(model.dtype)


def multiplies_packed(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies a type on this processor; if not, packing may raise."""
    if not torch.backends.mkldnn.is_available():  # its operators are missing too, as on macOS
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class MergedLinear(nn.Module):
    """Linear layers with one input, merged into one with concatenated outputs.

    The state dict holds the layers separately, plain and bit-identical, under their own names.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layers: dict[str, nn.Linear], pack: bool) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.sizes = [layer.out_features for layer in layers.values()]
        weight = torch.cat([layer.weight.detach() for layer in layers.values()])
        biases = [layer.bias.detach() for layer in layers.values() if layer.bias is not None]
        # oneDNN's layout is not a tensor that a module could register
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight) if pack else None
        plain = not pack or weight.dtype == torch.float32
        self.register_buffer("weight", weight if plain else None, persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        is_one_lane = x.numel() == x.shape[-1]
        if self.weight is None or (self.packed is not None and not is_one_lane):
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        parent = prefix[:-1].rpartition(".")[0]
        weight: Any = self.packed if self.weight is None else self.weight
        parts = {"weight": weight.to_dense().split(self.sizes)}
        if self.bias is not None:
            parts["bias"] = self.bias.split(self.sizes)
        for kind, tensors in parts.items():
            for name, tensor in zip(self.names, tensors, strict=True):
                destination[".".join(filter(None, (parent, name, kind)))] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MergedLinear":
        raise ValueError("merged models cannot be moved or cast: do that before merge_linears")


def merge_linears(model: Transformer, pack: bool) -> Transformer:
    """Merge the model's projections in place, except for a tied output layer.

    Args:
        pack: store all weights in oneDNN's order, for eager runs if `can_pack` (`torch.compile`
            packs by itself). In float32 the plain ones, faster for one lane, are kept as well.
    """
    for module in list(model.modules()):
        for merged, names in getattr(module, "mergeable", {}).items():
            layers = {name: getattr(module, name) for name in names}
            for name in names:
                delattr(module, name)
            setattr(module, merged, MergedLinear(layers, pack))
        if pack:
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, MergedLinear({name: child}, pack))
    return model.requires_grad_(False)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize (N, K) to int8, a row's largest magnitude to 127; return (N,) float32 scales too."""
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


class Int8Linear(nn.Module):
    bias: Tensor | None

    def __init__(self, layer: nn.Linear | MergedLinear) -> None:
        super().__init__()
        assert layer.weight is not None
        # not buffers: scales stay float32 when a model is cast
        self.weight, self.scales = round_to_int8(layer.weight.detach().float())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        out = (F.linear(x, self.weight.to(x.dtype)) * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        super()._apply(fn, recurse)
        self.weight = fn(self.weight)
        self.scales = self.scales.to(self.weight.device)
        return self


def int8_companion(device: torch.device) -> torch.dtype:
    """Return the type of the other weights; in float16 sums of integers overflow."""
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def round_linears(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Quantize a model's linear layers (not packed) in place, and cast the rest to `dtype`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | MergedLinear):
                setattr(module, name, Int8Linear(child))
    return model.to(dtype).requires_grad_(False)
