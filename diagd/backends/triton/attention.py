"""Attention of a step's lanes over the cache, split over the keys, without a mask in memory.

A step has few lanes and thousands of keys, so each key head's slots are split into parts, one per
program: it evaluates the visibility rule from the positions and steps that it holds anyway
(`diagd.decoding.visibility.visible`), and keeps a running softmax. The last program of a head to
arrive joins the parts in float32, in a fixed order, so a step is bit-reproducible. The query heads
that share a key head are rows of one program: keys are read once for all of them.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diagd.backends.triton.launching import gdc_launch_dependents, gdc_wait, launch_settings
from diagd.decoding.visibility import Seen

NUM_PROGRAMS = 256  # enough for the 108 to 142 multiprocessors of the GPUs we know
MIN_PART = 128  # slots; shorter parts do not pay for joining
MAX_PARTS = 32  # that one program joins
AT_ONCE: tl.constexpr = tl.constexpr(4096)  # numbers of parts that it reads at once
LOG2_E = 1.4426950408889634


class Tiling(NamedTuple):  # of a program, sized to avoid spills
    rows: int  # query heads x lanes
    keys: int


def tiling_of(num_rows: int, head_size: int, dtype: torch.dtype) -> Tiling:
    """Choose the tiles for `num_rows` rows (query heads that share a key head x lanes)."""
    if dtype == torch.float32:  # without tensor cores: a whole product is in registers
        return Tiling(16, 16)
    keys = 64 if head_size % 16 == 0 else 32  # numbers of odd sizes have addresses of their own
    if num_rows <= 16 or head_size > 128:
        return Tiling(16, keys)
    return Tiling(32, keys) if num_rows <= 32 else Tiling(64, 32)


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
    out,
    counters,
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
    DEPENDENT: tl.constexpr,
):
    """Attend to one part of the slots of one key head; the launch grid is (rows, parts, heads).

    Args:
        sums: (B, L, heads, parts, SIZE) float32, weighted values, to be divided by the total.
        tops: (B, L, heads, parts) float32, the largest score. totals: of the weights.
        out: (B, L, heads, SIZE). counters: int32, zeros.
        query_strides, key_strides, value_strides: of batch, head and lane or slot.
        position_stride, step_stride, held_stride, fed_stride: of batch; 0 if shared.
        scale: of the scores, times log2(e).
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
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
    num_parts = tl.num_programs(1)
    where = row * num_parts + part
    there = alive[:, None] & within
    tl.store(sums + where[:, None] * SIZE + places[None, :], weighted, there)
    tl.store(tops + where, top, alive)
    tl.store(totals + where, total, alive)
    tl.debug_barrier()  # before one thread tells the others
    counter = counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
        tl.debug_barrier()
        where = row * num_parts
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for other in range(0, num_parts):
            top = tl.maximum(top, tl.load(tops + where + other, alive, float("-inf")))
        level = tl.where(top == float("-inf"), 0.0, top)
        ends = tl.where(alive, num_parts, 0)
        total, weighted = tl.zeros_like(total), tl.zeros_like(weighted)
        at_once: tl.constexpr = max(1, AT_ONCE // (ROWS * WIDTH))
        for first in range(0, num_parts, at_once):
            for offset in tl.static_range(at_once):
                one = where + first + offset
                some = first + offset < ends
                share = tl.exp2(tl.load(tops + one, some, float("-inf")) - level)
                total += tl.load(totals + one, some, 0.0) * share
                own = sums + one[:, None] * SIZE + places[None, :]
                weighted += tl.load(own, some[:, None] & within, 0.0) * share[:, None]
        joined = weighted / tl.where(total == 0, 1.0, total)[:, None]
        own = out + row[:, None] * SIZE + places[None, :]
        tl.store(own, joined.to(out.dtype.element_ty), there)
        tl.store(counter, 0)


def attend_slots(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Seen,
    counters: Tensor,
    dependent: bool = False,
) -> Tensor:
    """Attend under a plain visibility (see `Seen.is_plain`); a lane that sees no slot gets zeros.

    Args:
        queries: (B, L, heads, D), D at most 256.
        keys, values: (B, kv_heads, M, D) in the dtype of the queries; kv_heads divides heads. They
            may be the first slots of larger buffers.
        counters: (MAX_COUNTERS,) int32, zeros, and zeros afterwards.
        dependent: start before the kernel before has ended.

    Returns:
        (B, L, heads, D).
    """
    batch, num_lanes, num_heads, size = queries.shape
    kv_heads, num_slots = keys.shape[1:3]
    group, width = num_heads // kv_heads, max(16, triton.next_power_of_2(size))
    tiling = tiling_of(group * num_lanes, size, queries.dtype)
    tiles = triton.cdiv(group * num_lanes, tiling.rows)
    part_slots = part_size(num_slots, tiles * batch * kv_heads, tiling.keys)
    num_parts = triton.cdiv(num_slots, part_slots)
    rule = [
        (one if one.stride(-1) == 1 else one.contiguous()).expand(batch, -1)
        for one in (seen.positions, seen.steps, seen.held, seen.fed_at)
    ]
    lanes_last = queries.transpose(1, 2)
    strides = [one.stride()[:3] for one in (lanes_last, keys, values)]
    parts = batch, num_lanes, num_heads, num_parts
    tops, totals = queries.new_empty(2, *parts, dtype=torch.float32)
    sums = queries.new_empty(*parts, size, dtype=torch.float32)
    out = queries.new_empty(batch, num_lanes, num_heads, size)
    attend_part[tiles, num_parts, batch * kv_heads](
        queries,
        keys,
        values,
        *rule,
        sums,
        tops,
        totals,
        out,
        counters,
        *strides,
        *(one.stride(0) for one in rule),
        size**-0.5 * LOG2_E,
        num_lanes,
        num_slots,
        part_slots,
        seen.window,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        WIDTH=width,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        DEPENDENT=dependent,
        num_warps=8 if tiling.rows * width >= 8192 else 4,  # whose registers hold the sums
        num_stages=2,
        enable_fp_fusion=True,
        **launch_settings(dependent),
    )
    return out
