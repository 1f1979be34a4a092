"""Masked attention and its gradients, for training on CPUs that multiply bfloat16.

PyTorch's attention also multiplies masked positions, far below the processor's speed: it took two
thirds of a step of finetuning by diagonals (dev/LOG.md).
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diagd.backends.native.boundary import AttendedRecord, check_end
from diagd.backends.native.library import load_library
from diagd.models.attention import Attend, attend
from diagd.system import usable_cores

logger = logging.getLogger("diagd")
_most_threads = cache(usable_cores)
SIDE = 32  # lanes of a block; fully masked blocks are skipped


class TrainedMask(NamedTuple):  # in the kernels' format
    visible: Tensor  # (L, L) bool, True = lane q (row) may attend to lane r
    seen_by: Tensor  # (L, L) bool, its transpose, contiguous
    # (L / 32, L / 32) uint8, rounded up: of 32 x 32 pairs 0 none may attend, 1 some, 2 all
    blocks: Tensor


def trained_mask(visible: Tensor) -> TrainedMask:
    spare = -len(visible) % SIDE
    padded = F.pad(visible, (0, spare, 0, spare)).unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))
    some, whole = padded.any(3).any(1), padded.all(3).all(1)
    blocks = some.to(torch.uint8) + whole.to(torch.uint8)
    return TrainedMask(visible.contiguous(), visible.T.contiguous(), blocks)


def mask_kernel(visible: Tensor | None, lanes: int) -> Attend | None:
    """Return attention under a mask (L, L), or causal, if this machine has the kernels."""
    if not kernels_train():
        return None
    if visible is None:
        visible = torch.ones(lanes, lanes, dtype=torch.bool).tril()
    return partial(masked_attention, mask=trained_mask(visible))


@cache
def kernels_train() -> bool:
    try:
        return bool(load_library().attention_trains())
    except OSError as error:
        logger.warning("%s: training with PyTorch's attention", error)
        return False


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: TrainedMask) -> Tensor:
    """Attend under a mask, differentiably; a lane that sees nothing gets zeros.

    The kernels handle bfloat16 and D a multiple of 32, PyTorch the rest.

    Args:
        queries: (B, heads, L, D). keys, values: (B, kv_heads, L, D); kv_heads divides heads.
    """
    shapes = [tuple(one.shape) for one in (queries, keys, values)]
    (batch, heads, lanes, head_dim), kv_heads = shapes[0], shapes[1][1]
    if (
        shapes[1:] != [(batch, kv_heads, lanes, head_dim)] * 2
        or heads % kv_heads
        or mask.visible.shape != (lanes, lanes)
        or not queries.dtype == keys.dtype == values.dtype
    ):
        raise ValueError(
            "queries must be (B, heads, L, D), keys and values (B, kv_heads, L, D) of one "
            f"type, mask (L, L), got {shapes} and {tuple(mask.visible.shape)}"
        )
    if queries.dtype != torch.bfloat16 or queries.shape[-1] % SIDE:
        return attend(queries, keys, values, mask.visible)
    given = (one.transpose(1, 2).contiguous() for one in (queries, keys, values))
    return _forward(*given, *mask)[0].transpose(1, 2)


def run_forward(library: ctypes.CDLL, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs for queries (B, L, heads, D), and their softmax masses (B, heads, L).

    Arguments are queries, keys and values, contiguous bfloat16, and the three parts of the mask.
    """
    batch, lanes, heads, _ = given[0].shape
    out, masses = torch.empty_like(given[0]), torch.empty(batch, heads, lanes)
    _call(library.attend_forward, given, to=out, masses=masses)
    return out, masses


def run_backward(
    library: ctypes.CDLL, out_grad: Tensor, out: Tensor, masses: Tensor, *given: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, from `run_forward`'s arguments and results."""
    queries, keys, values = map(torch.empty_like, given[:3])
    grads = {"queries_grad": queries, "keys_grad": keys, "values_grad": values}
    _call(library.attend_backward, given, out_grad=out_grad, out=out, masses=masses, **grads)
    return queries, keys, values


def _call(function: Callable[..., Any], given: tuple[Tensor, ...], **others: Tensor) -> None:
    batch, lanes, heads, head_dim = given[0].shape
    names = ("queries", "keys", "values", *TrainedMask._fields)
    record = AttendedRecord(
        batch=batch,
        heads=heads,
        kv_heads=given[1].shape[2],
        lanes=lanes,
        head_dim=head_dim,
        threads=min(torch.get_num_threads(), _most_threads()),
        scale=head_dim**-0.5,
        **dict(zip(names, given, strict=True)),
        **others,
    )
    check_end(function(ctypes.byref(record)), "", f"attention of {batch} x {lanes} lanes")


# Operators, each atomic for torch.compile, with the shapes of its results and its gradients.
@torch.library.custom_op("diagd::masked_attention", mutates_args=())
def _forward(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seen_by: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    return run_forward(load_library(), queries, keys, values, visible, seen_by, blocks)


@torch.library.custom_op("diagd::masked_attention_gradients", mutates_args=())
def _backward(
    out_grad: Tensor, out: Tensor, masses: Tensor, given: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return run_backward(load_library(), out_grad, out, masses, *given)


@_forward.register_fake
def _(queries: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    masses = queries[..., 0].transpose(1, 2)  # for the shape
    return torch.empty_like(queries), torch.empty_like(masses, dtype=torch.float32).contiguous()


@_backward.register_fake
def _(out_grad: Tensor, out: Tensor, masses: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, given[:3]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs)


def _gradients(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, masses, *given = ctx.saved_tensors
    return *_backward(out_grad.contiguous(), out, masses, given), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
