"""The boundary to C++: its records, parsed from csrc/records.h, and checks of memory.

The kernels trust the sizes in a record, and check indices before they write.
"""

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diagd.backends.native.compiler import SOURCES
from diagd.decoding.model import Buffers
from diagd.decoding.sampling import Draw, ValidRanges
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.visibility import Seen

POINTER = ctypes.c_void_p
NUMBERS = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}
MAX_ROWS = 2**17  # lanes of all batch rows in a step: limits the memory of activations


def read_records(base: type[ctypes.Structure], pointer: Any, *headers: str) -> dict[str, Any]:
    """Return the records declared in headers of csrc, by name, as classes of a base; ValueError."""
    known: dict[str, Any] = dict(NUMBERS)
    name, text, fields = "", "", list[tuple[str, Any]]()
    for header in headers:
        for line in (SOURCES / header).read_text(encoding="utf-8").splitlines():
            line = line.partition("//")[0].strip()
            value = rf"({'|'.join(known)}) \w+(?:, \w+)*"
            if begins := re.fullmatch(r"RECORD\((\w+),", line):
                name, text, fields = begins[1], "", []
            elif line == ")":
                known[name] = type(name, (base,), {"_fields_": fields, "text": text})
            elif declared := re.fullmatch(
                rf"(?:const )?(?:{value}|\w+ \*+\w+(?:, \*+\w+)*);", line
            ):
                kind = known[declared[1]] if declared[1] else pointer
                fields += [(field, kind) for field in re.findall(r"\w+(?=[,;])", line)]
                text += line
            elif line and not line.startswith("#"):
                raise ValueError(f"{header}: no field of a record: {line}")
    return {name: known[name] for name in known if name not in NUMBERS}


class Record(ctypes.Structure):
    """A record that is filled with pointers to memory, and keeps that memory alive."""

    def __init__(self, **values: Any) -> None:
        kinds = Tensor | ctypes.Array
        self.memory = {name: one for name, one in values.items() if isinstance(one, kinds)}
        super().__init__(**values | {name: address(one) for name, one in self.memory.items()})


def address(memory: Tensor | ctypes.Array | None) -> int | None:
    if memory is None:
        return None
    return memory.data_ptr() if isinstance(memory, Tensor) else ctypes.addressof(memory)


RECORDS = read_records(Record, POINTER, "records.h")
LayerRecord, ModelRecord, StepRecord, DrawRecord, DrawingRecord, SpaceRecord, AttendedRecord = (
    RECORDS[name] for name in ("Layer", "Model", "Step", "Draw", "Drawing", "Space", "Attended")
)


def check_records(described: bytes, records: dict[str, Any]) -> None:
    """Raise OSError unless kernels have these records, with fields at the same offsets."""
    theirs = ["".join(line.split()) for line in described.decode().splitlines()]
    for name, record in records.items():
        offsets = [getattr(record, field).offset for field, _ in record._fields_]
        numbers = map(str, (ctypes.sizeof(record), *offsets))
        if ",".join((*numbers, name, record.text)).replace(" ", "") not in theirs:
            raise OSError(f"kernels have another record {name} than csrc: build them again")


def check_step(tokens: Tensor, positions: Tensor, slots: Tensor, seen: Seen) -> list[Tensor]:
    """Return contiguous tokens, positions and slots (S, L), or raise ValueError."""
    wrong = (
        "tokens must be (S, L), positions and slots (S, L) or (L,), with as many lanes as seen, "
        f"and S * L from 1 to {MAX_ROWS}"
    )
    given = tokens, positions, slots
    fits = tokens.ndim == 2 and 0 < tokens.numel() <= MAX_ROWS
    _check_shapes(fits, wrong, *given, seen.positions)
    _check_int64(tokens=tokens, positions=positions, slots=slots)
    return _of_each(tokens.shape, wrong, *given, seen.positions)[:3]


def seen_fields(seen: Seen, shape: Sequence[int]) -> dict[str, Any]:
    """Return the visibility fields of a step record for (S, L) lanes, or raise ValueError."""
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
    mask = _of_each((*shape, slots), "mask must be (S, L, M) or (L, M)", mask)[0]
    return found | {"visible": mask if mask.numel() else mask.new_empty(1)}


def _of_each(shape: Sequence[int], wrong: str, *given: Tensor) -> list[Tensor]:
    """Expand tensors without a sequence dimension to all sequences, contiguous; or ValueError."""
    shapes = tuple(shape), tuple(shape[1:])
    _check_shapes(all(one.shape in shapes for one in given), wrong, *given)
    return [one.expand(shape).contiguous() for one in given]


def check_draw(logits: Tensor, draw: Draw) -> None:
    """Raise ValueError unless these are valid logits (S, L, V), seeds (S,) and places."""
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
    """Raise ValueError unless these are valid tokens, held and fed_at (S, M) and seeds (S,)."""
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


def coordinate_fields(coordinates: Tensor | None, shape: Sequence[int]) -> dict[str, Tensor]:
    """Return the coordinate field of a step record, or raise ValueError."""
    if coordinates is None:
        return {}
    _check_int64(coordinates=coordinates)
    expected = 3, *shape
    _check_shapes(coordinates.shape == expected, f"coordinates must be {expected}", coordinates)
    return {"coordinates": coordinates.permute(1, 2, 0).contiguous()}


def check_lanes(lanes: Tensor, first: int, num_sequences: int, num_fields: int) -> tuple[int, int]:
    """Return S' and L; ValueError unless lanes have `num_fields` fields and valid memory."""
    _check_int64(lanes=lanes)
    shape = lanes.shape
    count, width = shape[1:] if len(shape) == 3 else (0, 0)
    if not (
        0 < count * width <= MAX_ROWS
        and shape[0] == num_fields
        and (width == 1 or lanes.stride(2) == 1)
        and 0 <= first <= num_sequences - count
    ):
        raise ValueError(
            f"lanes must be ({num_fields}, S, L), fields contiguous, S * L from 1 to {MAX_ROWS}, "
            f"of {num_sequences} sequences from {first} on, got {tuple(shape)}"
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
    """Raise ValueError for 1 with `wrong`, MemoryError for 2 with `what`."""
    if failure == 1:
        raise ValueError(wrong)
    if failure:
        raise MemoryError(f"out of memory for {what}")


def check_step_end(failure: int, step: Record) -> None:
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
