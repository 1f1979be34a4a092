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
from diagd.models.attention import SlotRule
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
def rules(draw: Any, lanes: int, seen: int) -> SlotRule:
    sizes = [(lanes,), (seen,), (seen,)]
    return SlotRule(*(draw(tensors(size, torch.int64)) for size in sizes))


@st.composite
def steps(draw: Any) -> tuple[tuple[Tensor, ...], int, int, int]:
    batch, lanes, seen = draw(SIZES), draw(SIZES), draw(SIZES)
    step = (
        draw(tensors((batch, lanes), torch.int64)),
        draw(tensors((lanes,), torch.int64)),
        draw(tensors((lanes,), torch.int64)),
        draw(st.one_of(tensors((lanes, seen), torch.bool), rules(lanes, seen))),
    )
    rows = batch if draw(st.integers(0, 5)) else draw(SIZES)
    return step, max(1, rows), draw(st.sampled_from([1, 8, 33, 34])), draw(INTEGERS)


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
    arguments, batch, slots, keep = step
    model = MODELS[of]
    cache = MODELS[cached_by if not same else of].make_cache(batch, slots)
    try:
        logits = model.forward(*arguments, cache=cache, logits_to_keep=keep)
    except ValueError:
        event("refused")
    else:
        event("computed")
        assert logits.isfinite().all()
        assert logits.shape[0] == batch


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
    frames = draw(tensors((lanes,), torch.int64))
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
