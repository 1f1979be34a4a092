"""Linear layers of a step, fused with the norm before and with what follows them.

A step of few lanes waits for weights, so a program multiplies some outputs of a layer with all
lanes, and a step takes few launches. Two rows of outputs belong together in every program: gate and
up, the two halves of a rotated head, or any two others. Weights are the left operand, in their
own type: 8-bit ones widen in registers. Where there are few outputs, the inner dimension is split;
the last program of an output to arrive adds the parts, in a fixed order, so a step is
bit-reproducible.

On GPUs of capability 9.0 and later a kernel starts before the one before it has ended
(programmatic dependent launch): until `gdc_wait` it may read nothing but weights.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

from diagd.backends.triton.launching import gdc_launch_dependents, gdc_wait

PLAIN, RMS, LAYER = (tl.constexpr(kind) for kind in range(3))  # norms
NONE, SWIGLU, TANH_GELU, EXACT_GELU = (tl.constexpr(kind) for kind in range(4))  # activations


@triton.jit
def _statistics(x, lanes, alive, eps, INNER: tl.constexpr, CHUNK: tl.constexpr, NORM: tl.constexpr):
    """Return the mean, 0 for RMSNorm, and the inverse deviation of rows of x, (LANES,) each."""
    mean = tl.zeros(lanes.shape, tl.float32)
    squares = tl.zeros(lanes.shape, tl.float32)
    inner = tl.arange(0, CHUNK)
    if NORM == LAYER:
        for start in range(0, INNER, CHUNK):
            there = alive[:, None] & (start + inner < INNER)[None, :]
            part = tl.load(x + lanes[:, None] * INNER + (start + inner)[None, :], there, 0.0)
            mean += tl.sum(part.to(tl.float32), 1)
        mean = mean / INNER
    for start in range(0, INNER, CHUNK):
        there = alive[:, None] & (start + inner < INNER)[None, :]
        part = tl.load(x + lanes[:, None] * INNER + (start + inner)[None, :], there, 0.0)
        off = tl.where(there, part.to(tl.float32) - mean[:, None], 0.0)
        squares += tl.sum(off * off, 1)
    return mean, tl.rsqrt(squares / INNER + eps)


@triton.jit
def _weights_at(weights, rows, valid, inner, end, INNER: tl.constexpr):
    there = valid[:, None] & (inner < end)[None, :]
    return tl.load(weights + rows.to(tl.int64)[:, None] * INNER + inner[None, :], there, 0.0)


@triton.jit
def _widened(left, kind: tl.constexpr):
    return left.to(kind) if left.dtype == kind else left.to(tl.float32).to(kind)


@triton.jit
def _normed(x, gains, shifts, lanes, alive, inner, end, mean, spread, INNER: tl.constexpr,
            NORM: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """Return numbers of x, (CHUNK, LANES), normed and rounded to its type."""
    within = inner < end
    part = tl.load(x + lanes[None, :] * INNER + inner[:, None], within[:, None] & alive[None, :], 0)
    if NORM != PLAIN:
        wide = (part.to(tl.float32) - mean[None, :]) * spread[None, :]
        if GAIN:
            wide *= tl.load(gains + inner, within, 0.0).to(tl.float32)[:, None]
        if SHIFT:
            wide += tl.load(shifts + inner, within, 0.0).to(tl.float32)[:, None]
        part = tl.where(within[:, None], wide, 0.0).to(part.dtype)
    return part


@triton.jit
def _multiply(weights, x, gains, shifts, parts, counters, rows, behind, valid, valid_behind, lanes,
              alive, eps, INNER: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr,
              SHIFT: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
              SPLITS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Multiply rows of weights with lanes of x, normed.

    The launch grid is (tiles of outputs, splits, tiles of lanes).

    Args:
        weights: (outputs, INNER), in their own type. x: (lanes, INNER).
        rows, behind: (OUTPUTS,), the two rows of outputs; `valid` where they exist.
        parts: (programs, 2, OUTPUTS, LANES) float32. counters: int32, zeros.

    Returns:
        Products (OUTPUTS, LANES) float32 of the two rows, and whether this program has all.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    begin = tl.program_id(1) * tl.cdiv(tl.cdiv(INNER, CHUNK), SPLITS) * CHUNK
    end = tl.minimum(begin + tl.cdiv(tl.cdiv(INNER, CHUNK), SPLITS) * CHUNK, INNER)
    inner = begin + tl.arange(0, CHUNK)
    left = _weights_at(weights, rows, valid, inner, end, INNER)
    left_behind = _weights_at(weights, behind, valid_behind, inner, end, INNER)
    if DEPENDENT:
        gdc_wait()
    mean, spread = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    if NORM != PLAIN:
        mean, spread = _statistics(x, lanes, alive, eps, INNER, CHUNK, NORM)
    right = _normed(
        x, gains, shifts, lanes, alive, inner, end, mean, spread, INNER, NORM, GAIN, SHIFT
    )
    product = tl.dot(_widened(left, right.dtype), right, input_precision="ieee")
    product_behind = tl.dot(_widened(left_behind, right.dtype), right, input_precision="ieee")
    for start in range(begin + CHUNK, end, CHUNK):
        inner = start + tl.arange(0, CHUNK)
        right = _normed(
            x, gains, shifts, lanes, alive, inner, end, mean, spread, INNER, NORM, GAIN, SHIFT
        )
        left = _weights_at(weights, rows, valid, inner, end, INNER)
        left_behind = _weights_at(weights, behind, valid_behind, inner, end, INNER)
        product += tl.dot(_widened(left, right.dtype), right, input_precision="ieee")
        product_behind += tl.dot(_widened(left_behind, right.dtype), right, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        one = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        places = tl.arange(0, OUTPUTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        parts += one.to(tl.int64) * (SPLITS * 2 * OUTPUTS * LANES) + places
        own = parts + tl.program_id(1) * (2 * OUTPUTS * LANES)
        tl.store(own, product)
        tl.store(own + OUTPUTS * LANES, product_behind)
        tl.debug_barrier()  # before one thread tells the others
        is_last = tl.atomic_add(counters + one, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.debug_barrier()
            product, product_behind = tl.zeros_like(product), tl.zeros_like(product)
            for split in tl.static_range(SPLITS):
                product += tl.load(parts + split * (2 * OUTPUTS * LANES))
                product_behind += tl.load(parts + split * (2 * OUTPUTS * LANES) + OUTPUTS * LANES)
            tl.store(counters + one, 0)
    return product, product_behind, is_last


@triton.jit
def _finished(product, scales, biases, rows, valid, SCALE: tl.constexpr, BIAS: tl.constexpr):
    if SCALE:
        product *= tl.load(scales + rows, valid, 0.0)[:, None]
    if BIAS:
        product += tl.load(biases + rows, valid, 0.0).to(tl.float32)[:, None]
    return product


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SWIGLU:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == TANH_GELU:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    elif ACTIVATION == EXACT_GELU:
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit(do_not_specialize=["num_lanes"])
def project(
    weights,
    scales,
    biases,
    x,
    gains,
    shifts,
    out,
    parts,
    counters,
    num_lanes,
    eps,
    NUM_OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out = activation(norm(x) @ weights.T + bias), added to what is there if ADDS.

    Args:
        weights: (NUM_OUTPUTS, INNER), or (2 * NUM_OUTPUTS, INNER) for SWIGLU: gates, then ups.
        scales: (outputs,) float32 of 8-bit weights. x: (lanes, INNER).
        out: (lanes, NUM_OUTPUTS).
    """
    lanes = tl.program_id(2) * LANES + tl.arange(0, LANES)
    alive = lanes < num_lanes
    if ACTIVATION == SWIGLU:
        rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        behind = rows + NUM_OUTPUTS
        valid_behind = rows < NUM_OUTPUTS
    else:
        rows = tl.program_id(0) * (2 * OUTPUTS) + tl.arange(0, OUTPUTS)
        behind = rows + OUTPUTS
        valid_behind = behind < NUM_OUTPUTS
    valid = rows < NUM_OUTPUTS
    first, second, is_last = _multiply(
        weights, x, gains, shifts, parts, counters, rows, behind, valid, valid_behind, lanes, alive,
        eps, INNER, NORM, GAIN, SHIFT, OUTPUTS, LANES, CHUNK, SPLITS, DEPENDENT
    )  # fmt: skip
    if is_last:
        first = _activated(_finished(first, scales, biases, rows, valid, SCALE, BIAS), ACTIVATION)
        second = _finished(second, scales, biases, behind, valid_behind, SCALE, BIAS)
        place = out + lanes[None, :].to(tl.int64) * NUM_OUTPUTS + rows[:, None]
        there = valid[:, None] & alive[None, :]
        if ACTIVATION == SWIGLU:
            first *= second
        else:
            second = _activated(second, ACTIVATION)
            there_behind = valid_behind[:, None] & alive[None, :]
            if ADDS:
                second += tl.load(place + OUTPUTS, there_behind, 0.0).to(tl.float32)
            tl.store(place + OUTPUTS, second.to(out.dtype.element_ty), there_behind)
        if ADDS:
            first += tl.load(place, there, 0.0).to(tl.float32)
        tl.store(place, first.to(out.dtype.element_ty), there)


@triton.jit(do_not_specialize=["num_lanes", "num_of_sequence", "first_sequence", "slot_stride"])
def project_heads(
    weights,
    scales,
    biases,
    x,
    gains,
    shifts,
    query_gains,
    query_shifts,
    key_gains,
    key_shifts,
    turns,
    slots,
    queries,
    keys,
    values,
    parts,
    counters,
    num_lanes,
    num_of_sequence,
    first_sequence,
    slot_stride,
    cache_strides,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ROTATES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Project queries, keys and values, norm and rotate heads, and store keys and values at slots.

    A program has pairs of one head: all of them if heads are normed.

    Args:
        weights: ((HEADS + 2 KV_HEADS) * 2 HALF, INNER). x: (lanes of all sequences, INNER).
        query_gains, ...: (2 HALF,), or for LAYER (heads * 2 HALF,).
        turns: (2, lanes, HALF) float32, cosines and sines. slots: (sequences, num_of_sequence).
        queries: (lanes, HEADS, 2 HALF). keys, values: caches, with strides of sequence, head, slot.
    """
    tiles: tl.constexpr = (HALF + OUTPUTS - 1) // OUTPUTS
    lanes = tl.program_id(2) * LANES + tl.arange(0, LANES)
    alive = lanes < num_lanes
    head = tl.program_id(0) // tiles
    pairs = (tl.program_id(0) % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = pairs < HALF
    rows = head * (2 * HALF) + pairs
    first, second, is_last = _multiply(
        weights, x, gains, shifts, parts, counters, rows, rows + HALF, valid, valid, lanes, alive,
        eps, INNER, NORM, GAIN, SHIFT, OUTPUTS, LANES, CHUNK, SPLITS, DEPENDENT
    )  # fmt: skip
    if is_last:
        first = _finished(first, scales, biases, rows, valid, SCALE, BIAS)
        second = _finished(second, scales, biases, rows + HALF, valid, SCALE, BIAS)
        if head < HEADS + KV_HEADS:
            if HEAD_NORM != PLAIN:
                own = pairs
                if HEAD_NORM == LAYER:
                    own += (head if head < HEADS else head - HEADS) * (2 * HALF)
                    mean = (tl.sum(first, 0) + tl.sum(second, 0)) / (2 * HALF)
                    first = tl.where(valid[:, None], first - mean[None, :], 0.0)
                    second = tl.where(valid[:, None], second - mean[None, :], 0.0)
                squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
                spread = tl.rsqrt(squares / (2 * HALF) + eps)[None, :]
                given = query_gains if head < HEADS else key_gains
                first *= spread * tl.load(given + own, valid, 0.0).to(tl.float32)[:, None]
                second *= spread * tl.load(given + own + HALF, valid, 0.0).to(tl.float32)[:, None]
                if HEAD_NORM == LAYER:
                    added = query_shifts if head < HEADS else key_shifts
                    first += tl.load(added + own, valid, 0.0).to(tl.float32)[:, None]
                    second += tl.load(added + own + HALF, valid, 0.0).to(tl.float32)[:, None]
            if ROTATES:
                turned = turns + lanes[None, :] * HALF + pairs[:, None]
                there = valid[:, None] & alive[None, :]
                cosine = tl.load(turned, there, 0.0)
                sine = tl.load(turned + num_lanes * HALF, there, 0.0)
                kept = first
                first = first * cosine - second * sine
                second = second * cosine + kept * sine
        if head < HEADS:
            place = queries + (lanes.to(tl.int64) * HEADS + head) * (2 * HALF)
        else:
            sequence, lane = lanes // num_of_sequence, lanes % num_of_sequence
            slot = tl.load(slots + sequence * slot_stride + lane, alive, 0)
            place = keys
            own_head = head - HEADS
            if head >= HEADS + KV_HEADS:
                place = values
                own_head = head - HEADS - KV_HEADS
            place += (first_sequence + sequence).to(tl.int64) * cache_strides[0]
            place += own_head * cache_strides[1] + slot * cache_strides[2]
        there = valid[:, None] & alive[None, :]
        place = place[None, :] + pairs[:, None]
        tl.store(place, first.to(queries.dtype.element_ty), there)
        tl.store(place + HALF, second.to(queries.dtype.element_ty), there)


@triton.jit
def add_normed(x, gains, out, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr,
               DEPENDENT: tl.constexpr):  # fmt: skip
    """out += RMSNorm(x), rows (lanes, SIZE); a program for each lane."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.arange(0, WIDTH)
    within, row = places < SIZE, tl.program_id(0).to(tl.int64) * SIZE
    wide = tl.load(x + row + places, within, 0.0).to(tl.float32)
    spread = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * spread * tl.load(gains + places, within, 0.0).to(tl.float32)
    before = tl.load(out + row + places, within, 0.0).to(tl.float32)
    tl.store(out + row + places, (before + normed).to(out.dtype.element_ty), within)
