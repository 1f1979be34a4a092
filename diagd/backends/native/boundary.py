"""The boundary to C++: records, as both sides see them, and checks before memory is read.

The kernels read as many numbers as a record promises, and check indices before they write.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.model import Buffers
from diagd.decoding.sampling import Draw, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.visibility import Seen

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
        (INT, "grid_width tokens_per_frame head_size sliding_window"),
        (FLOAT, "norm_eps"),
        (POINTER, "embeddings head positions frequencies axes norm norm_bias"),
        (POINTER, "head_scale head_bias head_proj head_proj_scale head_proj_bias weights"),
    )


class StepRecord(Record):
    _fields_ = fields(
        (INT, "sequences lanes visible_slots num_slots first cached keep threads"),
        (ctypes.c_int64, "held_stride"),
        (POINTER, "tokens at slots visible steps held fed_at keys values logits seconds"),
    )


class DrawRecord(Record):
    _fields_ = fields(
        (INT, "count vocab stride threads top_k exclusive_top_p"),
        (FLOAT, "temperature top_p"),
        (POINTER, "logits low high seeds frames rows columns drawn seconds"),
    )


class DrawingRecord(Record):
    _fields_ = [
        ("rules", DrawRecord),
        *fields((INT, "sequences height width"), (ctypes.c_int64, "low high")),
        ("by_place", POINTER),
    ]


class SpaceRecord(Record):
    _fields_ = fields(
        (POINTER, "tokens seeds lanes"),
        (ctypes.c_int64, "field_stride sequence_stride"),
        (POINTER, "drawings"),
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
    steps = StepRecord, DrawRecord, DrawingRecord, SpaceRecord
    for record in (LayerRecord, ModelRecord, *steps, AttendedRecord):
        name = record.__name__.removesuffix("Record").lower()
        theirs, ours = getattr(library, f"size_of_{name}")(), ctypes.sizeof(record)
        if theirs != ours:
            raise OSError(f"the kernels' record {name} has {theirs} bytes, expected {ours}")


def check_step(tokens: Tensor, positions: Tensor, slots: Tensor, seen: Seen) -> list[Tensor]:
    """Return tokens, positions and slots (S, L) in one piece, or raise ValueError."""
    wrong = (
        "tokens must be (S, L), positions and slots, too, or (L,), of as many lanes as see, with "
        f"S * L from 1 to {MAX_ROWS}"
    )
    given = tokens, positions, slots
    fits = tokens.ndim == 2 and 0 < tokens.numel() <= MAX_ROWS
    _check_shapes(fits, wrong, *given, seen.positions)
    _check_int64(tokens=tokens, positions=positions, slots=slots)
    return _of_each(tokens.shape, wrong, *given, seen.positions)[:3]


def seen_fields(seen: Seen, shape: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a step record that say who of (S, L) sees whom, or raise ValueError."""
    _check_int64(held=seen.held, steps=seen.steps, fed_at=seen.fed_at)
    wrong = "steps must be (S, L) or (L,), held and fed_at (S, M) or (M,)"
    slots = seen.held.shape[-1] if seen.held.ndim else 0
    held, fed_at = _of_each((shape[0], slots), wrong, seen.held, seen.fed_at)
    steps = _of_each(shape, wrong, seen.steps)[0]
    found = {"held": held, "held_stride": slots, "visible_slots": slots}
    if seen.is_plain:
        return found | {"steps": steps, "fed_at": fed_at}
    mask = seen.mask()
    if mask.dtype != torch.bool or not mask.is_cpu:
        raise ValueError(f"visible must be bool on the cpu, got {_kind_of(mask)}")
    mask = _of_each((*shape, slots), "a mask must be (S, L, M) or (L, M)", mask)[0]
    return found | {"visible": mask if mask.numel() else mask.new_empty(1)}


def _of_each(shape: Sequence[int], wrong: str, *given: Tensor) -> list[Tensor]:
    """Give all sequences what has no dimension of them, in one piece; or raise ValueError."""
    shapes = tuple(shape), tuple(shape[1:])
    _check_shapes(all(one.shape in shapes for one in given), wrong, *given)
    return [one.expand(shape).contiguous() for one in given]


def check_draw(logits: Tensor, draw: Draw) -> None:
    """Raise ValueError unless these are logits (S, L, V), seeds (S,) and places in memory."""
    places = draw.frames, draw.rows, draw.columns
    _check_shapes(
        logits.ndim == 3
        and draw.seeds.shape == logits.shape[:1]
        and {place.shape for place in places} <= {logits.shape[:2], logits.shape[1:2]}
        and logits.shape[:2].numel() <= MAX_ROWS,
        "logits must be (S, L, V), seeds (S,), frames, rows and columns (S, L) or (L,), with S * L "
        f"at most {MAX_ROWS}",
        *(logits, draw.seeds, *places),
    )
    _check_int64(seeds=draw.seeds, frames=draw.frames, rows=draw.rows, columns=draw.columns)
    if not logits.is_cpu or not logits.is_floating_point():
        raise ValueError(f"logits must be floats on the cpu, got {_kind_of(logits)}")
    check_ids(draw.ranges, logits.shape[2])


def check_memory_of(buffers: Buffers) -> None:
    """Raise ValueError unless these are tokens, held and fed_at (S, M) and seeds (S,) in memory."""
    given = {name: getattr(buffers, name) for name in ("tokens", "held", "fed_at", "seeds")}
    _check_int64(**given)
    tokens, held, fed_at, seeds = given.values()
    _check_shapes(
        tokens.ndim == 2
        and held.shape == fed_at.shape == tokens.shape
        and seeds.shape == tokens.shape[:1]
        and all(one.is_contiguous() for one in given.values()),
        "tokens, held and fed_at must be (S, M), seeds (S,), all contiguous",
        *given.values(),
    )


def check_lanes(lanes: Tensor, first: int, num_sequences: int) -> tuple[int, int]:
    """Return S' and L, or raise ValueError unless these are lanes (8, S', L) in memory."""
    _check_int64(lanes=lanes)
    shape = lanes.shape
    count, width = shape[1:] if len(shape) == 3 else (0, 0)
    if not (
        0 < count * width <= MAX_ROWS
        and shape[0] == 8
        and (width == 1 or lanes.stride(2) == 1)
        and 0 <= first <= num_sequences - count
    ):
        raise ValueError(
            f"lanes must be (8, S, L), fields in one piece, with S * L from 1 to {MAX_ROWS}, of "
            f"{num_sequences} sequences from {first} on, got {tuple(shape)}"
        )
    return count, width


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
    what = f"{step.sequences} x {step.lanes} lanes over {step.visible_slots} slots"
    check_end(failure, "a token, position or slot is out of range", what)


def _check_shapes(is_right: bool, expected: str, *given: Tensor) -> None:
    if not is_right:
        raise ValueError(f"{expected}, got {', '.join(str(tuple(one.shape)) for one in given)}")


def check_ids(ranges: ValidRanges, vocab: int) -> None:
    if not 0 <= ranges.low < ranges.high <= vocab:
        raise ValueError(f"valid ids must be in [0, {vocab}), got [{ranges.low}, {ranges.high})")


def _check_int64(**indices: Tensor) -> None:
    for name, index in indices.items():
        if index.dtype != torch.int64 or not index.is_cpu:
            raise ValueError(f"{name} must be int64 on the cpu, got {_kind_of(index)}")


def _kind_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
