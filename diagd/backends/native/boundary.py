"""What crosses into C++: the records, as both sides see them, and checks before memory is read.

The kernels read as many numbers as a record promises, so what comes from outside is held against
the promise first: a look at shapes and types, a few microseconds. Indices are checked by the
kernels themselves, before they write anything.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.model import Buffers
from diagd.decoding.sampling import Draw, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.visibility import SlotRule

MAX_ROWS = 2**17  # lanes of all batch rows in a step: their activations have to fit the memory


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class LayerRecord(ctypes.Structure):
    """Addresses of one layer's weights: LayerWeights in csrc/records.h."""

    _fields_ = _fields(
        ctypes.c_void_p,
        "qkv out gate_up down qkv_bias out_bias gate_up_bias down_bias "
        "qkv_scale out_scale gate_up_scale down_scale "
        "norm1 norm1_bias norm2 norm2_bias q_norm k_norm",
    )


class ModelRecord(ctypes.Structure):
    """Shape of a model and addresses of its weights: Model in csrc/records.h."""

    _fields_ = [
        *_fields(
            ctypes.c_int32,
            "hidden intermediate layers heads kv_heads head_dim vocab rms gated "
            "num_embeddings max_positions prefix actions grid_width grid_tokens",
        ),
        ("eps", ctypes.c_float),
        *_fields(
            ctypes.c_void_p,
            "embeddings head positions frequencies axes norm norm_bias head_scale weights",
        ),
    ]


class StepRecord(ctypes.Structure):
    """Step in csrc/records.h."""

    _fields_ = [
        *_fields(ctypes.c_int32, "batch lanes visible_slots num_slots keep threads"),
        *_fields(ctypes.c_void_p, "tokens at slots visible steps held fed_at"),
        *_fields(ctypes.c_void_p, "keys values logits seconds"),
    ]


class DrawRecord(ctypes.Structure):
    """Draw in csrc/records.h."""

    _fields_ = [
        *_fields(ctypes.c_int32, "batch lanes vocab stride threads top_k exclusive_top_p"),
        *_fields(ctypes.c_float, "temperature top_p"),
        *_fields(ctypes.c_void_p, "logits low high seeds frames rows columns drawn seconds"),
    ]


class SpaceRecord(ctypes.Structure):
    """Space in csrc/records.h."""

    _fields_ = [
        *_fields(ctypes.c_int32, "slots height width"),
        *_fields(ctypes.c_int64, "low high"),
        *_fields(ctypes.c_void_p, "by_place tokens lanes"),
        ("stride", ctypes.c_int64),
    ]


class AttendedRecord(ctypes.Structure):
    """Attended in csrc/packing.h."""

    _fields_ = [
        *_fields(ctypes.c_int32, "batch heads kv_heads lanes head_dim threads"),
        ("scale", ctypes.c_float),
        *_fields(
            ctypes.c_void_p,
            "visible seen_by blocks queries keys values out out_grad "
            "to queries_grad keys_grad values_grad masses",
        ),
    ]


_RECORDS = {
    "layer": LayerRecord,
    "model": ModelRecord,
    "step": StepRecord,
    "draw": DrawRecord,
    "space": SpaceRecord,
    "attended": AttendedRecord,
}


def check_records(library: ctypes.CDLL) -> None:
    """Raise OSError unless both sides see records of the same size."""
    for name, record in _RECORDS.items():
        theirs, ours = getattr(library, f"size_of_{name}")(), ctypes.sizeof(record)
        if theirs != ours:
            raise OSError(f"the kernels' record {name} has {theirs} bytes, expected {ours}")


def check_step(
    tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | SlotRule
) -> None:
    """Raise ValueError unless these are tokens (B, L), indices (L,) and a mask (L, M) in memory."""
    lanes = tokens.shape[-1:]
    if isinstance(visible, SlotRule):
        _check_int64(steps=visible.steps, held=visible.held, fed_at=visible.fed_at)
        if {one.ndim for one in visible} != {1} or visible.held.shape != visible.fed_at.shape:
            shapes = (str(tuple(one.shape)) for one in visible)
            raise ValueError(f"steps must be (L,), held and fed_at (M,), got {', '.join(shapes)}")
    if (
        tokens.ndim != 2
        or len(visible.shape) != 2
        or not positions.shape == slots.shape == visible.shape[:1] == lanes
        or not 0 < tokens.numel() <= MAX_ROWS
    ):
        shapes = (str(tuple(one.shape)) for one in (tokens, positions, slots, visible))
        raise ValueError(
            "tokens must be (B, L), positions and slots (L,), visible (L, M), with B * L from 1 to "
            f"{MAX_ROWS}, got {', '.join(shapes)}"
        )
    _check_int64(tokens=tokens, positions=positions, slots=slots)
    if isinstance(visible, Tensor) and (visible.dtype != torch.bool or not visible.is_cpu):
        raise ValueError(f"visible must be bool on the cpu, got {_kind_of(visible)}")


def check_draw(logits: Tensor, draw: Draw) -> None:
    """Raise ValueError unless these are logits (B, L, V), seeds (B,) and places (L,) in memory."""
    seeds, frames, rows, columns = draw.seeds, draw.frames, draw.rows, draw.columns
    batch, lanes = logits.shape[:1], logits.shape[1:2]
    if (
        logits.ndim != 3
        or seeds.shape != batch
        or not frames.shape == rows.shape == columns.shape == lanes
    ):
        shapes = (str(tuple(one.shape)) for one in (logits, seeds, frames, rows, columns))
        raise ValueError(
            "logits must be (B, L, V), seeds (B,), frames, rows and columns (L,), "
            f"got {', '.join(shapes)}"
        )
    _check_int64(seeds=seeds, frames=frames, rows=rows, columns=columns)
    if not logits.is_cpu or not logits.is_floating_point():
        raise ValueError(f"logits must be floats on the cpu, got {_kind_of(logits)}")
    _check_ids(draw.ranges, logits.shape[2])


def check_space(buffers: Buffers, ranges: ValidRanges, vocab: int) -> None:
    """Raise ValueError unless these are tokens (B, S), two (S,) and seeds (B,) in memory."""
    tokens, held, fed_at, seeds = buffers.tokens, buffers.held, buffers.fed_at, buffers.seeds
    slots, given = tokens.shape[-1:], (tokens, held, fed_at, seeds)
    _check_int64(tokens=tokens, held=held, fed_at=fed_at, seeds=seeds)
    if (
        tokens.ndim != 2
        or not held.shape == fed_at.shape == slots
        or seeds.shape != tokens.shape[:1]
        or not all(one.is_contiguous() for one in given)
    ):
        shapes = (str(tuple(one.shape)) for one in given)
        raise ValueError(
            "tokens must be (B, S), held and fed_at (S,), seeds (B,), all contiguous, "
            f"got {', '.join(shapes)}"
        )
    if ranges.by_place is not None:
        _check_int64(by_place=ranges.by_place)
    _check_ids(ranges, vocab)


def check_lanes(lanes: Tensor, batch: int) -> None:
    """Raise ValueError unless these are lanes (8, L) in memory, each field in one piece."""
    _check_int64(lanes=lanes)
    fits = lanes.ndim == 2 and lanes.shape[0] == 8 and lanes.stride(1) == 1
    if not (fits and 0 < batch * lanes.shape[1] <= MAX_ROWS):
        raise ValueError(
            f"lanes must be (8, L), fields in one piece, with B * L from 1 to {MAX_ROWS}, "
            f"got {tuple(lanes.shape)}"
        )


def rules_of(options: SamplingOptions, vocab: int) -> dict[str, Any]:
    """Return what a DrawRecord says of how to draw."""
    return {
        "top_k": min(options.top_k or 0, vocab),
        "exclusive_top_p": options.exclusive_top_p,
        "temperature": options.temperature,
        "top_p": 1.0 if options.top_p is None else options.top_p,
    }


def check_end(failure: int, step: StepRecord) -> None:
    """Raise what a step failed with, if it did."""
    if failure == 1:
        raise ValueError("a token, position or slot is out of range")
    if failure:
        raise MemoryError(f"no memory for {step.lanes} lanes over {step.visible_slots} slots")


def _check_ids(ranges: ValidRanges, vocab: int) -> None:
    if not 0 <= ranges.low < ranges.high <= vocab:
        raise ValueError(f"valid ids must be in [0, {vocab}), got [{ranges.low}, {ranges.high})")


def _check_int64(**indices: Tensor) -> None:
    for name, index in indices.items():
        if index.dtype != torch.int64 or not index.is_cpu:
            raise ValueError(f"{name} must be int64 on the cpu, got {_kind_of(index)}")


def _kind_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
