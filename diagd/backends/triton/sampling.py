"""Sample tokens in one kernel: no sort, no noise in memory, logits written once.

A program samples one lane's token, the same as `diagd.decoding.sampling.sample`. Top-k keeps logits
not below the k-th largest, which is found bit by bit. Top-p needs no ranking: the best of score +
noise is drawn from all ids; if the mass before it excludes it, everything after it is excluded too,
and the best of those before it is drawn instead.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from diagd.decoding import sampling

MAX_IDS = 2048  # processed at once by a program
_PLACES = ["frames", "rows", "columns", "drawn"]
UNDRAWN: tl.constexpr = tl.constexpr(sampling.UNDRAWN)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _key(seed, frame, row, column):
    high = (seed >> 32).to(tl.uint32)
    key = _mix(seed.to(tl.uint32) ^ _mix(high ^ 0x9E3779B9))
    key = _mix(key ^ _mix(frame.to(tl.uint32) + 0x85EBCA6B))
    key = _mix(key ^ _mix(row.to(tl.uint32) + 0x85EBCA6B))
    return _mix(key ^ _mix(column.to(tl.uint32) + 0x85EBCA6B))


@triton.jit
def _noise(key, ids):
    bits = _mix(key ^ _mix(ids.to(tl.uint32) + 0x9E3779B9))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # log1p(-uniform), where `left` has lost digits by as much as its logarithm
    left = 1 - uniform
    lost = tl.where(left == 1, 1.0, 1 - left)
    tail = tl.where(left == 1, uniform, -tl.log(left) * tl.div_rn(uniform, lost))
    return -tl.log(tail)


@triton.jit
def _scores(logits, ids, low, high, temperature, SAMPLED: tl.constexpr):
    valid = (ids >= low) & (ids < high)
    scores = tl.load(logits + ids, mask=valid, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        scores = tl.div_rn(scores, temperature)
    return tl.where(scores == 0, 0.0, scores)  # no -0, which `_ordered` treats as another number


@triton.jit
def _ordered(scores):
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _is_before(masses, ids, mass, id):
    return (masses > mass) | ((masses == mass) & (ids < id))


@triton.jit(do_not_specialize=["width", "top_k"], do_not_specialize_on_alignment=_PLACES)
def draw_token(
    logits,
    places,
    seeds,
    frames,
    rows,
    columns,
    drawn,
    low,
    high,
    width,
    batch_stride,
    lane_stride,
    place_strides,
    temperature,
    top_k,
    top_p,
    BY_PLACE: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    IDS: tl.constexpr,
):
    """Sample the token of a lane of a batch row; the launch grid is (lanes, batch).

    Args:
        logits: (B, L, V), contiguous ids. places: (height, width, 2) int64, or unused.
        drawn: (B, L) int64.
        low, high: the valid ids, unless BY_PLACE.
    """
    lane, batch = tl.program_id(0), tl.program_id(1)
    frame = tl.load(frames + batch * place_strides[0] + lane)
    row = tl.load(rows + batch * place_strides[1] + lane)
    column = tl.load(columns + batch * place_strides[2] + lane)
    if BY_PLACE:
        place = places + (row * width + column) * 2
        low, high = tl.load(place).to(tl.int32), tl.load(place + 1).to(tl.int32)
    logits += batch.to(tl.int64) * batch_stride + lane.to(tl.int64) * lane_stride
    block = tl.arange(0, IDS)

    tops = tl.full((IDS,), float("-inf"), tl.float32)
    broken = tl.zeros((IDS,), tl.int32)
    for start in range(low, high, IDS):
        scores = _scores(logits, start + block, low, high, temperature, SAMPLED)
        broken |= (scores < float("inf")).to(tl.int32) ^ 1  # also for NaN
        tops = tl.maximum(tops, scores)
    top = tl.max(tops, 0)
    is_broken = (tl.max(broken, 0) > 0) | (top == float("-inf"))

    threshold = tl.full((), 0, tl.uint32)  # in `_ordered` scores, the limit of top-k
    if TOP_K:
        digit = tl.full((), 0x80000000, tl.uint32)
        for _ in range(32):
            more = threshold | digit
            counts = tl.zeros((IDS,), tl.int32)
            for start in range(low, high, IDS):
                scores = _scores(logits, start + block, low, high, temperature, SAMPLED)
                counts += (_ordered(scores) >= more).to(tl.int32)
            threshold = tl.where(tl.sum(counts, 0) >= top_k, more, threshold)
            digit = digit >> 1

    mass = tl.full((), 0.0, tl.float32)
    if TOP_P:
        sums = tl.zeros((IDS,), tl.float32)
        for start in range(low, high, IDS):
            scores = _scores(logits, start + block, low, high, temperature, SAMPLED)
            sums += tl.where(_ordered(scores) >= threshold, tl.exp(scores - top), 0.0)
        mass = tl.sum(sums, 0)

    key = _key(tl.load(seeds + batch), frame, row, column)
    token, token_mass = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), -1.0, tl.float32)
    is_drawn = is_broken
    while not is_drawn:
        best = tl.full((IDS,), float("-inf"), tl.float32)
        best_ids = tl.full((IDS,), 0x7FFFFFFF, tl.int32)
        best_masses = tl.zeros((IDS,), tl.float32)
        for start in range(low, high, IDS):
            ids = start + block
            scores = _scores(logits, ids, low, high, temperature, SAMPLED)
            noisy = scores
            if SAMPLED:
                noisy = scores + _noise(key, ids)
            if TOP_K:
                noisy = tl.where(_ordered(scores) >= threshold, noisy, float("-inf"))
            if TOP_P:
                masses = tl.exp(scores - top)
                before = _is_before(masses, ids, token_mass, token)
                noisy = tl.where(before, noisy, float("-inf"))
                best_masses = tl.where(noisy > best, masses, best_masses)
            best_ids = tl.where(noisy > best, ids, best_ids)
            best = tl.maximum(best, noisy)
        token = tl.min(tl.where(best == tl.max(best, 0), best_ids, 0x7FFFFFFF), 0)
        is_drawn = True
        if TOP_P:
            token_mass = tl.max(tl.where(best_ids == token, best_masses, 0.0), 0)
            sums = tl.zeros((IDS,), tl.float32)
            for start in range(low, high, IDS):
                ids = start + block
                scores = _scores(logits, ids, low, high, temperature, SAMPLED)
                masses = tl.exp(scores - top)
                counts = (_ordered(scores) >= threshold) & _is_before(
                    masses, ids, token_mass, token
                )
                sums += tl.where(counts, masses, 0.0)
            before = tl.sum(sums, 0)
            if EXCLUSIVE:
                is_drawn = (before == 0) | (tl.div_rn(before + token_mass, mass) <= top_p)
            else:
                is_drawn = tl.div_rn(before, mass) < top_p
    token = tl.where(is_broken, UNDRAWN, token)
    tl.store(drawn + batch * tl.num_programs(0) + lane, token.to(tl.int64))


def draw(
    logits: Tensor,
    places: Tensor | None,
    low: int,
    high: int,
    seeds: Tensor,
    frames: Tensor,
    rows: Tensor,
    columns: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    exclusive_top_p: bool,
) -> Tensor:
    """Sample one token per lane, like `diagd.decoding.sampling.sample` with its options expanded.

    Args:
        places: (height, width, 2) int64, the valid ids of each place; None: [low, high).
        top_k: 0 keeps all. top_p: 1.0 keeps all.
    """
    batch, num_lanes, _ = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    expanded = [one.expand(batch, num_lanes) for one in (frames, rows, columns)]
    places_of = [one if one.stride(-1) == 1 else one.contiguous() for one in expanded]
    where = seeds.contiguous(), *places_of
    drawn = torch.empty(batch, num_lanes, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        draw_token[num_lanes, batch](
            logits,
            seeds if places is None else places.contiguous(),
            *where,
            drawn,
            low,
            high,
            0 if places is None else places.shape[1],
            *logits.stride()[:2],
            tuple(one.stride(0) for one in places_of),
            temperature,
            top_k,
            top_p,
            BY_PLACE=places is not None,
            SAMPLED=temperature > 0,
            TOP_K=top_k > 0,
            TOP_P=top_p < 1,
            EXCLUSIVE=exclusive_top_p,
            IDS=min(MAX_IDS, triton.next_power_of_2(high - low)),
            num_warps=8,
            enable_fp_fusion=False,  # each operation rounds, as in PyTorch
        )
    return drawn
