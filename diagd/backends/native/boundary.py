"""The boundary to C++: records, as both sides see them, and checks before memory is read.

The kernels read as many numbers as a record promises, and check indices before they write.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.model import Buffers
from diagd.decoding.sampling import Draw, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.models.attention import SlotRule

INT, FLOAT, POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
MAX_ROWS = 2**17  # lanes of all batch rows in a step: their activations have to fit the memory


def fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class Record(ctypes.Structure):
    """A record that is given the memory that its pointers point to, and keeps that alive."""

    def __init__(self, **values: Any) -> None:
        kinds = Tensor | ctypes.Array
        self.memory = {name: one for name, one in values.items() if isinstance(one, kinds)}
        super().__init__(**values | {name: address(one) for name, one in self.memory.items()})


def address(memory: Tensor | ctypes.Array | None) -> int | None:
    if memory is None:
        return None
    return memory.data_ptr() if isinstance(memory, Tensor) else ctypes.addressof(memory)


# Records of csrc/records.h (a layer: LayerWeights) and csrc/packing.h, under their names there but
# for what a `ModelConfig` has another name for


class LayerRecord(Record):
    _fields_ = fields(
        (POINTER, "qkv out gate_up down qkv_bias out_bias gate_up_bias down_bias"),
        (POINTER, "qkv_scale out_scale gate_up_scale down_scale"),
        (POINTER, "norm1 norm1_bias norm2 norm2_bias q_norm q_norm_bias k_norm k_norm_bias"),
        (ctypes.c_int64, "slides"),
    )


class ModelRecord(Record):
    _fields_ = fields(
        (INT, "hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim"),
        (INT, "vocab_size rms gated num_embeddings max_positions prefix num_action_tokens"),
        (INT, "grid_width tokens_per_frame head_size sliding_window two_digits"),
        (FLOAT, "norm_eps"),
        (POINTER, "embeddings head positions frequencies axes norm norm_bias"),
        (POINTER, "head_scale head_bias head_proj head_proj_scale head_proj_bias weights"),
    )


class StepRecord(Record):
    _fields_ = fields(
        (INT, "batch lanes visible_slots num_slots keep threads"),
        (POINTER, "tokens at slots visible steps held fed_at keys values written logits seconds"),
    )


class DrawRecord(Record):
    _fields_ = fields(
        (INT, "batch lanes vocab stride threads top_k exclusive_top_p"),
        (FLOAT, "temperature top_p"),
        (POINTER, "logits low high seeds frames rows columns drawn seconds"),
    )


class SpaceRecord(Record):
    _fields_ = fields(
        (INT, "slots height width"),
        (ctypes.c_int64, "low high"),
        (POINTER, "by_place tokens lanes"),
        (ctypes.c_int64, "stride"),
    )


class AttendedRecord(Record):
    _fields_ = fields(
        (INT, "batch heads kv_heads lanes head_dim threads"),
        (FLOAT, "scale"),
        (POINTER, "visible seen_by blocks queries keys values out out_grad"),
        (POINTER, "to queries_grad keys_grad values_grad masses"),
    )


def check_records(library: ctypes.CDLL) -> None:
    """Raise OSError unless both sides see records of the same size."""
    for record in (LayerRecord, ModelRecord, StepRecord, DrawRecord, SpaceRecord, AttendedRecord):
        name = record.__name__.removesuffix("Record").lower()
        theirs, ours = getattr(library, f"size_of_{name}")(), ctypes.sizeof(record)
        if theirs != ours:
            raise OSError(f"the kernels' record {name} has {theirs} bytes, expected {ours}")


def check_step(
    tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | SlotRule
) -> None:
    """Raise ValueError unless these are tokens (B, L), indices (L,) and a mask (L, M) in memory."""
    lanes = tokens.shape[-1:]
    if isinstance(visible, SlotRule):
        _check_int64(**visible._asdict())
        flat = {one.ndim for one in visible} == {1} and visible.held.shape == visible.fed_at.shape
        _check_shapes(flat, "steps must be (L,), held and fed_at (M,)", *visible)
    elif visible.dtype != torch.bool or not visible.is_cpu:
        raise ValueError(f"visible must be bool on the cpu, got {_kind_of(visible)}")
    _check_shapes(
        tokens.ndim == len(visible.shape) == 2
        and positions.shape == slots.shape == visible.shape[:1] == lanes
        and 0 < tokens.numel() <= MAX_ROWS,
        "tokens must be (B, L), positions and slots (L,), visible (L, M), with B * L from 1 to "
        f"{MAX_ROWS}",
        *(tokens, positions, slots, visible),
    )
    _check_int64(tokens=tokens, positions=positions, slots=slots)


def check_draw(logits: Tensor, draw: Draw) -> None:
    """Raise ValueError unless these are logits (B, L, V), seeds (B,) and places (L,) in memory."""
    places = draw.frames, draw.rows, draw.columns
    _check_shapes(
        logits.ndim == 3
        and draw.seeds.shape == logits.shape[:1]
        and {place.shape for place in places} == {logits.shape[1:2]}
        and logits.shape[:2].numel() <= MAX_ROWS,
        "logits must be (B, L, V), seeds (B,), frames, rows and columns (L,), with B * L at most "
        f"{MAX_ROWS}",
        *(logits, draw.seeds, *places),
    )
    _check_int64(seeds=draw.seeds, frames=draw.frames, rows=draw.rows, columns=draw.columns)
    if not logits.is_cpu or not logits.is_floating_point():
        raise ValueError(f"logits must be floats on the cpu, got {_kind_of(logits)}")
    _check_ids(draw.ranges, logits.shape[2])


def check_space(buffers: Buffers, ranges: ValidRanges, vocab: int) -> None:
    """Raise ValueError unless these are tokens (B, S), two (S,) and seeds (B,) in memory."""
    given = {name: getattr(buffers, name) for name in ("tokens", "held", "fed_at", "seeds")}
    _check_int64(**given)
    tokens, held, fed_at, seeds = given.values()
    _check_shapes(
        tokens.ndim == 2
        and held.shape == fed_at.shape == tokens.shape[-1:]
        and seeds.shape == tokens.shape[:1]
        and all(one.is_contiguous() for one in given.values()),
        "tokens must be (B, S), held and fed_at (S,), seeds (B,), all contiguous",
        *given.values(),
    )
    if ranges.by_place is not None:
        _check_int64(by_place=ranges.by_place)
    _check_ids(ranges, vocab)


def check_lanes(lanes: Tensor, batch: int) -> None:
    """Raise ValueError unless these are lanes (8, L) in memory, each field in one piece."""
    _check_int64(lanes=lanes)
    fits = lanes.ndim == 2 and lanes.shape[0] == 8 and 1 in (lanes.shape[1], lanes.stride(1))
    _check_shapes(
        fits and 0 < batch * lanes.shape[1] <= MAX_ROWS,
        f"lanes must be (8, L), fields in one piece, with B * L from 1 to {MAX_ROWS}",
        lanes,
    )


def rules_of(options: SamplingOptions, vocab: int) -> dict[str, Any]:
    return {
        "top_k": min(options.top_k or 0, vocab),
        "exclusive_top_p": options.exclusive_top_p,
        "temperature": options.temperature,
        "top_p": 1.0 if options.top_p is None else options.top_p,
    }


def check_end(failure: int, wrong: str, what: str) -> None:
    """Raise ValueError for 1, saying what is wrong, MemoryError for 2, saying what is asked for."""
    if failure == 1:
        raise ValueError(wrong)
    if failure:
        raise MemoryError(f"no memory for {what}")


def check_step_end(failure: int, step: StepRecord) -> None:
    what = f"{step.lanes} lanes over {step.visible_slots} slots"
    check_end(failure, "a token, position or slot is out of range", what)


def _check_shapes(is_right: bool, expected: str, *given: Tensor | SlotRule) -> None:
    if not is_right:
        raise ValueError(f"{expected}, got {', '.join(str(tuple(one.shape)) for one in given)}")


def _check_ids(ranges: ValidRanges, vocab: int) -> None:
    if not 0 <= ranges.low < ranges.high <= vocab:
        raise ValueError(f"valid ids must be in [0, {vocab}), got [{ranges.low}, {ranges.high})")


def _check_int64(**indices: Tensor) -> None:
    for name, index in indices.items():
        if index.dtype != torch.int64 or not index.is_cpu:
            raise ValueError(f"{name} must be int64 on the cpu, got {_kind_of(index)}")


def _kind_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
