"""Pack linear layers once so that a step of several lanes costs the CPU what a step of one does.

`F.linear` reorders the weight for oneDNN on every call, or takes a slower kernel; here it is
reordered once. Measured on one core of an AMX Xeon, a 512 -> 2048 layer: 9 and 14 lanes run 2.2
times faster in float32 and 1.5 times in bfloat16; a single lane loses in float32
(docs/log.md). For
eager inference only: a packed layer has no gradient, and Inductor packs weights itself.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer that keeps its weight only in oneDNN's own order.

    The state dict still shows the plain weight, unpacked on request and bit-identical.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.packed.to_dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        raise ValueError("a packed model cannot be moved or cast: do that before pack_linears")


def pack_linears(model: AnyModule) -> AnyModule:
    """Replace every `nn.Linear` of the model by a `PackedLinear`, in place, and freeze the rest.

    Each plain weight is released as soon as it is packed, so the model never exists twice. A tied
    output layer stays as it is: it is the embedding table.

    Args:
        model: On the CPU, in float32 or bfloat16.

    Returns:
        The same model.

    Raises:
        ValueError: The model is elsewhere or in another dtype, or this torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("packing needs a torch built with oneDNN; this one is not")
    parents = list(model.modules())
    linears = [m for parent in parents for m in parent.children() if type(m) is nn.Linear]
    for linear in linears:
        weight = linear.weight
        if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
            raise ValueError(
                "packing needs a model on the cpu in float32 or bfloat16, "
                f"got {weight.dtype} on {weight.device}"
            )
    del linears
    for parent in parents:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return model.requires_grad_(False)
