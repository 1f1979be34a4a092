"""Checkpoints in miniature, and what the families' own code computes with them.

The goldens were made with the families' code on random weights; float32, so 1e-4 is far above
rounding (8e-6) and far below any wrong detail (0.01 and more).
"""

import torch
from torch import Tensor

from diagd.decoding.visibility import Seen
from diagd.models.transformer import Transformer
from tests.golden import golden


def model_golden(name: str) -> dict[str, Tensor]:
    return golden(f"{name}/golden.safetensors")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def feed_in_turn(model: Transformer, tokens: Tensor, prefill: int) -> tuple[Tensor, Tensor]:
    """Return the logits of a prefill of so many tokens, and of the others one by one."""
    length = tokens.shape[1]
    cache = model.make_cache(len(tokens), length + 1)
    lanes = [torch.arange(prefill), *torch.arange(prefill, length)[:, None]]
    parts = []
    for slots in lanes:
        held = torch.arange(int(slots[-1]) + 1)
        seen = Seen(slots, slots, held, held)
        parts.append(model.forward(tokens[:, slots], slots, slots, seen, cache))
    return parts[0], torch.cat(parts[1:], dim=1)
