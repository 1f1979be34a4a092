"""Attention from few lanes to many keys, of which only the last few frames need a mask.

A step of diagonal decoding has 12 to 64 lanes against thousands of cached keys. All but those of
the frames under way are seen by every lane, so they can be read by a kernel without a mask, and the
two halves joined by their log-sum-exp. `runs/attention_gpu.py` times the variants side by side.
Every one names the kernel it means: PyTorch raises an error rather than take another.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# (queries (B, heads, L, D), keys, values (B, kv_heads, M, D), visible (L, M) bool, prefix) -> out;
# the first `prefix` keys are seen by every lane
Variant = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def fold(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Turn the query heads that share a key head into lanes: (B, kv_heads, group * L, D)."""
    return queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def masked(backend: SDPBackend) -> Variant:
    """Return SDPA with a mask over all keys, by one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, prefix: int) -> Tensor:
        group = q.shape[1] // k.shape[1]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                fold(q, k.shape[1]), k, v, attn_mask=visible.repeat(group, 1)
            )
        return out.unflatten(2, (group, -1)).flatten(1, 2)

    return attend


def flex(compiled: bool) -> Variant:
    """Return FlexAttention, which skips blocks of keys that nobody sees."""
    call = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, prefix: int) -> Tensor:
        mask = create_block_mask(
            lambda b, h, lane, slot: visible[lane, slot],
            None,
            None,
            *visible.shape,
            device=str(q.device),
        )
        return call(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1])  # type: ignore[return-value]

    return attend


def merged(partial_attention: Callable[..., tuple[Tensor, Tensor]]) -> Variant:
    """Return attention to the prefix without a mask, joined with a masked tail.

    Args:
        partial_attention: (q, k, v, mask or None) -> output and log-sum-exp of the scores.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, prefix: int) -> Tensor:
        group = q.shape[1] // k.shape[1]
        folded = fold(q, k.shape[1])
        head = partial_attention(folded, k[:, :, :prefix], v[:, :, :prefix], None)
        tail_mask = visible[:, prefix:].repeat(group, 1)
        tail = partial_attention(folded, k[:, :, prefix:], v[:, :, prefix:], tail_mask)
        return join(*head, *tail).unflatten(2, (group, -1)).flatten(1, 2)

    return attend


def join(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Join attention to two sets of keys into attention to both.

    Args:
        out_a, out_b: (B, H, L, D), each normalised over its own keys.
        lse_a, lse_b: (B, H, L) float32 log-sum-exp of the scores; -inf where nothing is seen.
    """
    total = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((lse - total).exp()[..., None] for lse in (lse_a, lse_b))
    return (out_a.float() * weight_a + out_b.float() * weight_b).to(out_a.dtype)


def plain_partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend by the formula, in float32: the slow and obvious half of `merged`."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num()  # a lane that sees nothing here
    return (weights @ v.float()).to(q.dtype), lse


def efficient_partial(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend by CUDA's memory-efficient kernel, which hands out its log-sum-exp."""
    bias = None
    if mask is not None:
        bias = q.new_zeros(mask.shape).masked_fill(~mask, float("-inf"))
        bias = F.pad(bias, (0, -bias.shape[1] % 8))[:, : bias.shape[1]]  # rows must be aligned
        bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, compute_log_sumexp=True
    )
    return out, lse[..., : q.shape[2]]
