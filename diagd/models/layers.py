"""Layers of the decoder that know of one position only: norms and MLPs, under LLaMA's names."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagd.models.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, weight in the input's dtype, like LLaMA's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def make_norm(config: ModelConfig, affine: bool = True) -> nn.Module:
    """Build the norm the config names, over hidden_size."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(
        config.hidden_size, config.norm_eps, elementwise_affine=affine, bias=config.bias
    )


class SwiGLU(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    mergeable: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.gate_up_proj: nn.Module | None = None  # both, after merge_linears
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to the same shape."""
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class GELU(nn.Module):
    """Plain MLP with the tanh-approximated GELU of GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, hidden_size) to the same shape."""
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
