"""Attention of a step's lanes over the cache, split over the keys, without a mask in memory.

A step has few lanes and thousands of keys, so each key head's slots are split into parts, one per
program: it evaluates the visibility rule from the positions and steps that it holds anyway
(`diagd.decoding.visibility.visible`), and keeps a running softmax. A second kernel joins the parts
in float32, in a fixed order, so a step is bit-reproducible. The query heads that share a key head
are rows of one program: keys are read once for all of them.

Before that, one launch rotates a step's queries and keys and stores keys and values in the cache.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diagd.decoding.visibility import EVERYTHING

NUM_PROGRAMS = 256  # enough for the 108 to 142 multiprocessors of the GPUs we know
MIN_PART = 128  # slots; shorter parts do not pay for joining
MAX_PARTS = 64  # limit of a program of the second kernel
LOG2_E = 1.4426950408889634


class Tiling(NamedTuple):  # of a program of the first kernel, sized to avoid spills
    rows: int  # query heads x lanes
    keys: int


def tiling_of(num_rows: int, head_size: int, dtype: torch.dtype) -> Tiling:
    """Choose the tiles for `num_rows` rows (query heads that share a key head x lanes)."""
    if dtype == torch.float32:  # without tensor cores: a whole product is in registers
        return Tiling(16, 16)
    if num_rows <= 16 or head_size > 128:
        return Tiling(16, 64)
    return Tiling(32, 64) if num_rows <= 32 else Tiling(64, 32)


def part_size(num_slots: int, num_tiles: int, keys: int) -> int:
    """Return the slots of a part, a multiple of `keys`; `num_tiles` programs read each part."""
    max_parts = max(1, min(MAX_PARTS, NUM_PROGRAMS // num_tiles))
    size = min(num_slots, max(MIN_PART, triton.cdiv(num_slots, max_parts)))
    return triton.cdiv(size, keys) * keys


_STRIDES = ["position_stride", "step_stride", "held_stride", "fed_stride"]


@triton.jit(
    do_not_specialize=["num_lanes", "num_slots", "part_slots", "window", *_STRIDES],
    do_not_specialize_on_alignment=["positions", "steps", "held", "fed_at"],
)
def attend_part(
    queries,
    keys,
    values,
    positions,
    steps,
    held,
    fed_at,
    sums,
    tops,
    totals,
    query_strides,
    key_strides,
    value_strides,
    position_stride,
    step_stride,
    held_stride,
    fed_stride,
    scale,
    num_lanes,
    num_slots,
    part_slots,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to one part of the slots of one key head; the launch grid is (rows, parts, heads).

    Args:
        sums: (B, L, heads, parts, SIZE) float32, weighted values, to be divided by the total.
        tops: (B, L, heads, parts) float32, the largest score. totals: of the weights.
        query_strides, key_strides, value_strides: of batch, head and lane or slot.
        position_stride, step_stride, held_stride, fed_stride: of batch; 0 if shared.
        scale: of the scores, times log2(e).
    """
    part = tl.program_id(1)
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = rows % num_lanes
    heads = kv_head * GROUP + rows // num_lanes
    alive = rows < GROUP * num_lanes
    places = tl.arange(0, WIDTH)
    within = places[None, :] < SIZE
    offsets = heads * query_strides[1] + lanes * query_strides[2]
    looking = tl.load(
        queries + batch * query_strides[0] + offsets[:, None] + places[None, :],
        mask=alive[:, None] & within,
        other=0.0,
    )
    at = tl.load(positions + batch * position_stride + lanes)[:, None]
    now = tl.load(steps + batch * step_stride + lanes)[:, None]
    held += batch * held_stride
    fed_at += batch * fed_stride
    keys += batch * key_strides[0] + kv_head * key_strides[1]
    values += batch * value_strides[0] + kv_head * value_strides[1]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum((part + 1) * part_slots, num_slots)
    for start in range(part * part_slots, end, KEYS):
        slots = start + tl.arange(0, KEYS)
        inside = slots < end
        stands = tl.load(held + slots, mask=inside, other=0x7FFFFFFFFFFFFFFF)[None, :]
        fed = tl.load(fed_at + slots, mask=inside, other=0x7FFFFFFFFFFFFFFF)[None, :]
        sees = (stands == at) | ((stands < at) & (fed <= now) & (at - stands < window))
        there = inside[:, None] & within
        key = tl.load(keys + slots[:, None] * key_strides[2] + places[None, :], mask=there, other=0)
        score = tl.dot(looking, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(sees, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # a lane that has seen no slot yet
        weight = tl.exp2(score - level[:, None])
        shrink = tl.exp2(top - level)
        value = tl.load(
            values + slots[:, None] * value_strides[2] + places[None, :], mask=there, other=0
        )
        total = total * shrink + tl.sum(weight, 1)
        weighted = weighted * shrink[:, None]
        weighted += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top
    row = (batch * num_lanes + lanes) * (KV_HEADS * GROUP) + heads
    where = row * tl.num_programs(1) + part
    tl.store(sums + where[:, None] * SIZE + places[None, :], weighted, alive[:, None] & within)
    tl.store(tops + where, top, alive)
    tl.store(totals + where, total, alive)


@triton.jit(do_not_specialize=["num_parts"])
def join_parts(
    sums, tops, totals, out, num_parts, SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):
    """Join the parts of one head of one lane: (rows, parts, SIZE) -> (rows, SIZE)."""
    row = tl.program_id(0).to(tl.int64)
    parts, places = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    there, within = parts < num_parts, places < SIZE
    top = tl.load(tops + row * num_parts + parts, there, float("-inf"))
    best = tl.max(top, 0)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(tl.load(totals + row * num_parts + parts, there, 0.0) * share, 0)
    weighted = tl.load(
        sums + (row * num_parts + parts[:, None]) * SIZE + places[None, :],
        there[:, None] & within[None, :],
        0.0,
    )
    joined = tl.sum(weighted * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * SIZE + places, joined.to(out.dtype.element_ty), within)


@torch.library.custom_op("diagd::attend_slots", mutates_args=())
def attend_slots(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    steps: Tensor,
    held: Tensor,
    fed_at: Tensor,
    window: int = EVERYTHING,
) -> Tensor:
    """Attend under the visibility of `Seen(positions, steps, held, fed_at, window=window)`.

    A lane that sees no slot gets zeros. Keys and values may be the first slots of larger buffers.

    Args:
        queries: (B, heads, L, D), D at most 256.
        keys, values: (B, kv_heads, M, D) in the dtype of the queries; kv_heads divides heads.
        positions, steps: (B, L) int64, or (L,). held, fed_at: (B, M) int64, or (M,).
        window: maximum positions that a lane sees, its own included.

    Returns:
        (B, heads, L, D), a view of (B, L, heads, D).
    """
    batch, num_heads, num_lanes, size = queries.shape
    kv_heads, num_slots = keys.shape[1:3]
    group, width = num_heads // kv_heads, max(16, triton.next_power_of_2(size))
    tiling = tiling_of(group * num_lanes, size, queries.dtype)
    tiles = triton.cdiv(group * num_lanes, tiling.rows)
    part_slots = part_size(num_slots, tiles * batch * kv_heads, tiling.keys)
    num_parts = triton.cdiv(num_slots, part_slots)
    queries, keys, values = (  # contiguous within a head
        t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys, values)
    )
    rule = [
        (one if one.stride(-1) == 1 else one.contiguous()).expand(batch, -1)
        for one in (positions, steps, held, fed_at)
    ]
    strides = [*(one.stride()[:3] for one in (queries, keys, values)), *(r.stride(0) for r in rule)]
    parts = batch, num_lanes, num_heads, num_parts
    tops, totals = queries.new_empty(2, *parts, dtype=torch.float32)
    sums = queries.new_empty(*parts, size, dtype=torch.float32)
    out = queries.new_empty(batch, num_lanes, num_heads, size)
    with torch.cuda.device_of(queries):  # Triton launches on the current device
        attend_part[tiles, num_parts, batch * kv_heads](
            queries,
            keys,
            values,
            *rule,
            sums,
            tops,
            totals,
            *strides,
            size**-0.5 * LOG2_E,
            num_lanes,
            num_slots,
            part_slots,
            window,
            KV_HEADS=kv_heads,
            GROUP=group,
            SIZE=size,
            WIDTH=width,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
        join_parts[batch * num_lanes * num_heads,](
            sums,
            tops,
            totals,
            out,
            num_parts,
            SIZE=size,
            WIDTH=width,
            PARTS=triton.next_power_of_2(num_parts),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out.transpose(1, 2)


@attend_slots.register_fake
def _(queries: Tensor, *_: Tensor | int) -> Tensor:
    batch, num_heads, num_lanes, size = queries.shape
    return queries.new_empty(batch, num_lanes, num_heads, size).transpose(1, 2)


@triton.jit(
    do_not_specialize=["slot_stride", "turn_stride"], do_not_specialize_on_alignment=["slots"]
)
def store_head(
    queries,
    keys,
    values,
    cosines,
    sines,
    slots,
    rotated,
    key_cache,
    value_cache,
    query_strides,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    slot_stride,
    turn_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate or copy a head of a lane; the launch grid is (lanes, heads of all three, batch)."""
    lane = tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pairs = tl.arange(0, WIDTH)
    within = pairs < HALF
    slot = tl.load(slots + batch * slot_stride + lane)
    turn = batch * turn_stride + lane * HALF + pairs
    cosine = tl.load(cosines + turn, within, 0.0).to(tl.float32)
    sine = tl.load(sines + turn, within, 0.0).to(tl.float32)
    if head < HEADS:
        source = queries + batch * query_strides[0] + head * query_strides[1]
        source += lane * query_strides[2]
        target = rotated + ((batch * tl.num_programs(0) + lane) * HEADS + head) * (2 * HALF)
    elif head < HEADS + KV_HEADS:
        own = head - HEADS
        source = keys + batch * key_strides[0] + own * key_strides[1] + lane * key_strides[2]
        target = key_cache + batch * key_cache_strides[0] + own * key_cache_strides[1]
        target += slot * key_cache_strides[2]
    else:
        own = head - HEADS - KV_HEADS
        source = values + batch * value_strides[0] + own * value_strides[1]
        source += lane * value_strides[2]
        target = value_cache + batch * value_cache_strides[0] + own * value_cache_strides[1]
        target += slot * value_cache_strides[2]
        cosine, sine = tl.full((WIDTH,), 1.0, tl.float32), tl.zeros((WIDTH,), tl.float32)
    first = tl.load(source + pairs, within, 0.0).to(tl.float32)
    second = tl.load(source + HALF + pairs, within, 0.0).to(tl.float32)
    number = target.dtype.element_ty
    tl.store(target + pairs, (first * cosine - second * sine).to(number), within)
    tl.store(target + HALF + pairs, (second * cosine + first * sine).to(number), within)


@torch.library.custom_op("diagd::rotate_and_store", mutates_args=("key_cache", "value_cache"))
def rotate_and_store(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    first: int = 0,
) -> Tensor:
    """Store keys and values at slots; rotate keys and queries like `diagd.models.rotary.rotate`.

    Args:
        queries: (B, heads, L, D). keys, values: (B, kv_heads, L, D), each head contiguous.
        cosines, sines: (B, L, D / 2) or (L, D / 2). slots: (B, L) int64, or (L,); only scratch may
            repeat.
        key_cache, value_cache: (S, kv_heads, slots, D) in the dtype of the queries.
        first: sequence of the cache for the first batch row.

    Returns:
        The rotated queries, (B, heads, L, D), a view of (B, L, heads, D).
    """
    batch, num_heads, num_lanes, size = queries.shape
    kv_heads = keys.shape[1]
    turns = [one.contiguous() for one in (cosines, sines)]
    slots = slots.contiguous()
    key_cache, value_cache = key_cache[first:], value_cache[first:]
    given = queries, keys, values, key_cache, value_cache
    rotated = queries.new_empty(batch, num_lanes, num_heads, size)
    with torch.cuda.device_of(queries):
        store_head[num_lanes, num_heads + 2 * kv_heads, batch](
            queries,
            keys,
            values,
            *turns,
            slots,
            rotated,
            key_cache,
            value_cache,
            *[one.stride()[:3] for one in given],
            slots.stride(0) if slots.ndim == 2 else 0,
            turns[0].stride(0) if turns[0].ndim == 3 else 0,
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            WIDTH=triton.next_power_of_2(size // 2),
            num_warps=1,
            enable_fp_fusion=True,
        )
    return rotated.transpose(1, 2)


@rotate_and_store.register_fake
def _(queries: Tensor, *_: Tensor | int) -> Tensor:
    return queries.new_empty(queries.transpose(1, 2).shape).transpose(1, 2)
