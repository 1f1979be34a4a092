"""The start of a step: the lanes' embeddings, and the angles by which their heads turn."""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diagd.backends.triton.launching import gdc_launch_dependents, gdc_wait, launch_settings
from diagd.models.rotary import Rotary

QUARTER: tl.constexpr = tl.constexpr(math.pi / 2)
_STRIDES = ["token_stride", "input_stride", "place_stride", "axis_stride", "turn_stride"]


@triton.jit
def _cosine_and_sine(angle):
    """Return those of float64 angles in float32, by series within an eighth of a turn.

    The library's functions keep tables for large angles on a stack.
    """
    quarters = tl.floor(angle * (1 / QUARTER) + 0.5)
    x = tl.fma(quarters, -QUARTER, angle).to(tl.float32)
    y = x * x
    cosine = 1 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    sine = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880))))
    quarter = quarters.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    across, along = tl.where(is_odd, cosine, sine), tl.where(is_odd, sine, cosine)
    is_left = (quarter == 1) | (quarter == 2)
    return tl.where(is_left, -along, along), tl.where(quarter >= 2, -across, across)


@triton.jit(
    do_not_specialize=["num_lanes", "num_rows", "length", *_STRIDES],
    do_not_specialize_on_alignment=["inputs", "positions", "coordinates"],
)
def read_lane(
    tokens,
    inputs,
    embeddings,
    table,
    positions,
    coordinates,
    frequencies,
    axes,
    hidden,
    turns,
    num_lanes,
    num_rows,
    length,
    token_stride,
    input_stride,
    place_stride,
    axis_stride,
    turn_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    LEARNED: tl.constexpr,
    ROTATES: tl.constexpr,
    PLACED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the stream and the rotation of one lane; the launch grid is (lanes of all sequences,).

    Args:
        tokens: (sequences, slots) int64. inputs: (sequences, lanes), the slots that are read.
        table: (positions, SIZE), added if LEARNED.
        coordinates: (3, sequences, lanes), or positions.
        hidden: (rows, SIZE). turns: (2, rows, HALF) float32, cosines and sines.
        length: coordinates within it are multiplied in float32, as in training.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    sequence, lane = row // num_lanes, row % num_lanes
    slot = tl.load(inputs + sequence * input_stride + lane)
    token = tl.load(tokens + sequence * token_stride + slot)
    token = tl.maximum(token, 0)  # UNDRAWN is not an id: `Stream.take_frame` detects it
    position = tl.load(positions + sequence * place_stride + lane)
    for start in range(0, SIZE, WIDTH):
        places = start + tl.arange(0, WIDTH)
        within = places < SIZE
        numbers = tl.load(embeddings + token * SIZE + places, within, 0.0)
        if LEARNED:
            added = tl.load(table + position * SIZE + places, within, 0.0).to(tl.float32)
            numbers = (numbers.to(tl.float32) + added).to(numbers.dtype)
        tl.store(hidden + row.to(tl.int64) * SIZE + places, numbers, within)
    if ROTATES:
        pairs = tl.arange(0, PAIRS)
        within = pairs < HALF
        own = coordinates + sequence * turn_stride + lane
        coordinate = tl.load(own + tl.load(axes + pairs, within, 0) * axis_stride, within, 0)
        frequency = tl.load(frequencies + pairs, within, 0.0)
        whole = coordinate // length * length
        near = (coordinate - whole).to(tl.float32) * frequency.to(tl.float32)
        angle = whole.to(tl.float64) * frequency + near.to(tl.float64)
        cosine, sine = _cosine_and_sine(angle)
        if PLACED:  # a head turns in a row only, and is zero elsewhere
            is_placed = tl.load(own + axis_stride) >= 0
            cosine, sine = tl.where(is_placed, cosine, 0.0), tl.where(is_placed, sine, 0.0)
        tl.store(turns + row * HALF + pairs, cosine, within)
        tl.store(turns + (num_rows + row) * HALF + pairs, sine, within)


def read_lanes(
    tokens: Tensor,
    inputs: Tensor,
    embeddings: Tensor,
    table: Tensor | None,
    rotary: Rotary | None,
    positions: Tensor,
    coordinates: Tensor | None,
    head_dim: int,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the stream of lanes, and the cosines and sines by which their heads turn.

    Args:
        tokens: (S', slots) int64. inputs: (S', L) int64, the slot of each lane's token.
        embeddings: (ids, size). table: (max_positions, size), learned positions, if any.
        positions: (S', L) int64. coordinates: (3, S', L) int64, for models that have some.

    Returns:
        (S' * L, size) in the type of the embeddings, and (2, S' * L, head_dim / 2) float32.
    """
    (count, lanes), size = inputs.shape, embeddings.shape[1]
    rows, half = count * lanes, head_dim // 2
    if rotary is None or coordinates is None or rotary.config.position == "rope":
        coordinates = positions[None]
    given = [
        one if one.stride(-1) == 1 else one.contiguous() for one in (inputs, positions, coordinates)
    ]
    inputs, positions, coordinates = given
    hidden = embeddings.new_empty(rows, size)
    turns = embeddings.new_empty(2, rows, half, dtype=torch.float32)
    read_lane[rows,](
        tokens,
        inputs,
        embeddings,
        embeddings if table is None else table,
        positions,
        coordinates,
        positions if rotary is None else rotary.frequencies,
        positions if rotary is None else rotary.axes,
        hidden,
        turns,
        lanes,
        rows,
        1 if rotary is None else rotary.config.max_positions,
        tokens.stride(0),
        inputs.stride(0),
        positions.stride(0),
        coordinates.stride(0),
        coordinates.stride(1),
        SIZE=size,
        WIDTH=min(2048, triton.next_power_of_2(size)),
        HALF=half,
        PAIRS=triton.next_power_of_2(half),
        LEARNED=table is not None,
        ROTATES=rotary is not None,
        PLACED=rotary is not None and rotary.config.position == "rope2d",
        DEPENDENT=dependent,
        num_warps=4,
        enable_fp_fusion=False,  # each operation rounds, as in PyTorch
        **launch_settings(dependent),
    )
    return hidden, turns
