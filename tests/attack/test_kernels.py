"""Anything may be handed to the kernels: they compute, or it is a ValueError; nothing else.

A step that is accepted must be PyTorch's; run under AddressSanitizer (`make asan`), nothing outside
of a buffer is touched on the way.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.decoding.sampling import Draw, SamplingOptions, ValidRanges, sample
from diagd.decoding.visibility import Seen
from tests.models.tiny import KINDS, tiny_model

pytestmark = pytest.mark.slow
slow = [HealthCheck.too_slow]  # under the sanitizers, on a busy machine
attack = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=slow)

SIZES = st.sampled_from([0, 1, 2, 3, 5, 14, 15, 33])
INTEGERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 8, 49, 50, 63, 64, 2**31, 2**40, 2**63 - 1])
DTYPES = st.sampled_from([torch.int64] * 8 + [torch.int32, torch.float32, torch.bool])
DEVICES = st.sampled_from(["cpu"] * 12 + ["meta"])


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], right: torch.dtype) -> Tensor:
    """Draw a tensor that is mostly of the right shape, type, place and values; or a view of one."""
    if not draw(st.integers(0, 9)):
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
    dtype = right if draw(st.integers(0, 9)) else draw(DTYPES)
    values = st.sampled_from([0, 1]) if draw(st.integers(0, 4)) else INTEGERS
    few = [draw(values) for _ in range(3)]
    count = torch.Size(shape).numel()
    numbers = torch.tensor(few).repeat(count // 3 + 1)[:count].view(shape)
    tensor = numbers.to(dtype).to(draw(DEVICES))
    if draw(st.booleans()) and tensor.ndim:  # not contiguous
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


@st.composite
def seen_by(draw: Any, sequences: int, lanes: int, slots: int) -> Seen:
    """Draw who sees whom, of each sequence or of all, by the rule or by a mask."""
    of_each = (sequences,) * draw(st.integers(0, 1))
    sizes = [(*of_each, count) for count in (lanes, lanes, slots, slots)]
    positions, steps, held, fed_at = (draw(tensors(size, torch.int64)) for size in sizes)
    if draw(st.booleans()):
        return Seen(positions, steps, held, fed_at)
    return Seen.of_mask(draw(tensors((*of_each, lanes, slots), torch.bool)), positions, held)


@st.composite
def steps(draw: Any) -> tuple[tuple[Any, ...], int, int, int, int]:
    sequences, lanes, slots = draw(SIZES), draw(SIZES), draw(SIZES)
    of_lanes = (lanes,) if draw(st.booleans()) else (sequences, lanes)
    step = (
        draw(tensors((sequences, lanes), torch.int64)),
        draw(tensors(of_lanes, torch.int64)),
        draw(tensors(of_lanes, torch.int64)),
        draw(seen_by(sequences, lanes, slots)),
    )
    first = draw(st.sampled_from([0, 0, 0, 1, 2, -1]))
    cached = sequences + max(first, 0) if draw(st.integers(0, 5)) else draw(SIZES)
    return step, max(1, cached), draw(st.sampled_from([1, 8, 33, 34])), draw(INTEGERS), first


MODELS = {
    (kind, weights): NativeModel(tiny_model(**KINDS[kind]), weights)
    for kind in ("llama", "wham")
    for weights in ("float32", "bfloat16", "int8")
}


@seed(15)
@attack
@given(
    of=st.sampled_from(list(MODELS)),
    cached_by=st.sampled_from(list(MODELS)),
    same=st.integers(0, 5),
    step=steps(),
)
def test_a_step_of_anything_is_computed_or_refused(
    of: tuple[str, NativeDType], cached_by: tuple[str, NativeDType], same: int, step: Any
) -> None:
    arguments, cached, slots, keep, first = step
    model = MODELS[of]
    cache = MODELS[cached_by if not same else of].make_cache(cached, slots)
    try:
        logits = model.forward(*arguments, cache=cache, logits_to_keep=keep, first=first)
    except ValueError:
        event("refused")
    else:
        event("computed")
        assert logits.isfinite().all()
        assert 0 <= first <= first + logits.shape[0] <= cached


@st.composite
def draws(draw: Any) -> tuple[Tensor, Draw]:
    batch, lanes, vocab = draw(SIZES), draw(SIZES), draw(st.sampled_from([1, 5, 31, 32, 50]))
    logits = torch.randn(batch, lanes, vocab, generator=torch.Generator().manual_seed(0))
    broken = draw(st.sampled_from([None, torch.nan, torch.inf, -torch.inf, 3e38, -3e38]))
    if broken is not None and logits.numel():
        logits.view(-1)[:: draw(st.integers(1, 7))] = broken
    if not draw(st.integers(0, 7)):
        logits = draw(tensors((batch, lanes, vocab), torch.float32))
    if draw(st.booleans()) and logits.ndim == 3:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    bounds = [draw(st.sampled_from([-(2**40), -1, 0, 0, 0, 1, 5, 31, 50, 2**33])) for _ in range(2)]
    by_place = torch.tensor(bounds).expand(2, 2, 2) if draw(st.booleans()) else None
    low, high = bounds if not draw(st.integers(0, 3)) else (0, vocab)
    temperature = draw(st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1e30]))
    options = SamplingOptions(
        temperature,
        top_k=draw(st.sampled_from([None, 1, 3, 2**31 - 1])) if temperature else None,
        top_p=draw(st.sampled_from([None, 1e-9, 0.5, 1.0])) if temperature else None,
        exclusive_top_p=draw(st.booleans()),
    )
    seeds = draw(tensors((batch,), torch.int64))
    of_lanes = (lanes,) if draw(st.booleans()) else (batch, lanes)
    frames = draw(tensors(of_lanes, torch.int64))
    places = torch.arange(lanes) % 2
    ranges = ValidRanges(low, high, by_place)
    return logits, Draw(options, ranges, seeds, frames, places, places)


@seed(15)
@attack
@given(asked=draws())
def test_a_draw_from_anything_is_the_sampler_s_or_refused(asked: tuple[Tensor, Draw]) -> None:
    logits, draw = asked
    try:
        drawn = MODELS["llama", "float32"].sample(logits, draw)
    except ValueError:
        event("refused")
        return
    event("drawn")
    assert ((drawn >= -1) & (drawn < logits.shape[2])).all()
    if draw.options.temperature in (0.0, 0.5, 1.0) and draw.ranges.by_place is None:
        expected = sample(logits, draw)
        assert torch.equal(drawn == -1, expected == -1)
