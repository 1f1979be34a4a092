"""Sample tokens from logits: temperature, top-k, top-p, and Gumbel-max with per-token noise.

Logits have a best id if none of the valid ones is NaN or +inf and at least one is above -inf.
Otherwise the token is `UNDRAWN`, never garbage, and the writer of the stream reports it.

The noise of (row seed, frame, row, column, token id) is a counter-based hash of just these five:
independent of step, schedule, device, cache slot and the rest of the batch. So a seed repeats a run
anywhere, and two schedules with one seed use the same noise for the same token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diagd.decoding.sampling_options import SamplingOptions

UNDRAWN = -1
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class ValidRanges:
    """`valid_range` prepared for steps: one slice of the vocabulary, and a mask."""

    low: int  # first id of any range
    high: int  # one past the last id of any range
    by_place: Tensor | None = field(compare=False)  # (height, width, 2) int64 if ranges differ
    places: bytes = b""  # its bytes, to compare ranges

    @property
    def row_ends(self) -> Tensor | None:
        """The (height,) ids of row separators, if each row ends with a single valid id."""
        if self.by_place is None:
            return None
        low, high = self.by_place[:, -1].unbind(-1)
        return low if bool((high - low == 1).all()) else None

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the first valid id of places (...) and one past the last, (2, ...) int64."""
        if self.by_place is None:
            return torch.stack([torch.full_like(rows, end) for end in (self.low, self.high)])
        return self.by_place[rows, columns].movedim(-1, 0)

    @classmethod
    def resolve(
        cls,
        valid_range: tuple[int, int] | Tensor | None,
        height: int,
        width: int,
        vocab_size: int,
        device: torch.device,
    ) -> "ValidRanges":
        """Validate `SamplingOptions.valid_range` against the frame and the vocabulary."""
        if valid_range is None:
            return cls(0, vocab_size, None)
        ranges = torch.as_tensor(valid_range)
        if ranges.shape not in ((2,), (height, width, 2)) or ranges.is_floating_point():
            raise ValueError(
                f"valid_range must be (low, high) or ids of shape ({height}, {width}, 2), "
                f"got {ranges.dtype} of shape {tuple(ranges.shape)}"
            )
        ranges = ranges.long()
        low, high = ranges.unbind(-1)
        if (low < 0).any() or (high > vocab_size).any() or (low >= high).any():
            raise ValueError(
                f"valid_range must satisfy 0 <= low < high <= {vocab_size}, "
                f"got low {low.min()}..{low.max()}, high {high.min()}..{high.max()}"
            )
        bounds = int(low.min()), int(high.max())
        if (low == bounds[0]).all() and (high == bounds[1]).all():
            return cls(*bounds, None)
        return cls(*bounds, ranges.to(device), ranges.cpu().numpy().tobytes())


@dataclass(frozen=True)
class Draw:
    """Everything that a draw depends on besides the logits."""

    options: SamplingOptions
    ranges: ValidRanges
    seeds: Tensor  # (S,) int64, one for each sequence
    # (S, L) int64, or (L,) for all: frame of each lane's token, from the stream's start
    frames: Tensor
    rows: Tensor  # the same shape
    columns: Tensor


def sample(logits: Tensor, draw: Draw) -> Tensor:
    """Sample one token per lane from logits (S, L, V), without a host sync: (S, L) int64."""
    scores = truncated_logits(logits, draw)
    if draw.options.temperature > 0:
        scores = scores + gumbel_noise(draw, draw.ranges.low, draw.ranges.high)
    best = scores.amax(-1)  # NaN if any score is
    return if_any_best(lowest_id_of(best, scores) + draw.ranges.low, best)


def if_any_best(drawn: Tensor, best: Tensor) -> Tensor:
    """Return the ids drawn (S, L), or `UNDRAWN` if the highest score (S, L) is not finite."""
    return torch.where(best.abs() < float("inf"), drawn, UNDRAWN)


def truncated_logits(logits: Tensor, draw: Draw) -> Tensor:
    """Return (S, L, high - low) float32, divided by temperature, with excluded ids at -inf."""
    options, ranges = draw.options, draw.ranges
    logits = logits[..., ranges.low : ranges.high].float()
    if ranges.by_place is not None:
        bounds = ranges.by_place[draw.rows, draw.columns] - ranges.low  # (..., L, 2)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        valid = (ids >= bounds[..., :1]) & (ids < bounds[..., 1:])
        logits = logits.masked_fill(~valid, float("-inf"))
    if options.temperature == 0:
        return logits
    return truncate(logits / options.temperature, options)


def gumbel_noise(draw: Draw, low: int, high: int) -> Tensor:
    """Return the Gumbel(0, 1) noise of ids in [low, high) at each place, (S, L, ids) float32."""
    seeds = draw.seeds
    key = _mix((seeds & _MASK) ^ _mix((seeds >> 32) & _MASK ^ 0x9E3779B9))[:, None]  # (S, 1)
    for coordinate in (draw.frames, draw.rows, draw.columns):
        key = _mix(key ^ _mix(coordinate + 0x85EBCA6B & _MASK))  # (S, L)
    ids = torch.arange(low, high, device=seeds.device, dtype=torch.int64)
    # minus 2^32, which the mask removes: Inductor adds it as int32
    bits = _mix(key[..., None] ^ _mix(ids + (0x9E3779B9 - (1 << 32)) & _MASK))
    # The uniform is finest near 0, where large noise comes from.
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & _MASK
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & _MASK
    return bits ^ (bits >> 16)


def truncate(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Set the logits (..., V) outside top-k, then outside top-p, to -inf."""
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        threshold = logits.topk(options.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if options.top_p is not None and options.top_p < 1:
        probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        mass = probabilities.cumsum(-1)
        if options.exclusive_top_p:
            beyond = mass > options.top_p
            beyond[..., 0] = False
        else:
            beyond = mass - probabilities >= options.top_p
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, beyond)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


def lowest_id_of(best: Tensor, scores: Tensor) -> Tensor:
    """Return the lowest index of the best score on the last axis (torch.argmax may differ)."""
    size = scores.shape[-1]
    ids = torch.arange(size, device=scores.device)
    return torch.where(scores == best[..., None], ids, size - 1).amin(-1)


@torch.inference_mode()
def check_draws(
    sample_by_kernel: Callable[[Tensor, Draw], Tensor],
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError if the draws of a kernel differ from those of `sample`."""
    lanes = torch.arange(40, device=device)
    logits = torch.randn(3, 40, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7, 5] = torch.nan
    logits = logits.to(device, dtype)
    ranges, seeds = ValidRanges(2, vocab_size - 1, None), lanes[:3] + 2**40
    for options in (SamplingOptions(), SamplingOptions(0.8, top_k=30, top_p=0.9)):
        draw = Draw(options, ranges, seeds, lanes, lanes, lanes)
        drawn, expected = sample_by_kernel(logits, draw), sample(logits, draw)
        differing = int((drawn != expected).sum())
        if differing > 1 or drawn[0, 7] != UNDRAWN:  # rounding may change one draw
            raise ValueError(f"{differing} of {drawn.numel()} draws differ under {options}")
