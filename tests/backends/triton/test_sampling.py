"""`diagd/backends/triton/sampling.py` draws what `diagd.decoding.sampling.sample` draws."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diagd.decoding.sampling import UNDRAWN, Draw, SamplingOptions, ValidRanges, sample
from tests.backends.triton.interpreter import DEVICE
from tests.decoding.cases import noise_of

from diagd.backends.triton import sampling  # isort: skip
from diagd.backends.triton.model import make_sampler  # isort: skip

# the interpreter's, where a kernel goes on with what is broken and its result is thrown away
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
HEIGHT, WIDTH = 3, 5
HIGH = 9**9, HEIGHT, WIDTH  # of frames, rows and columns
draw = make_sampler()
TRUNCATIONS = {
    "none": {},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "exclusive": {"top_p": 0.8, "exclusive_top_p": True},
    "both": {"top_k": 9, "top_p": 0.6},
}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """A program looks at 32 ids at a time."""
    monkeypatch.setattr(sampling, "MAX_IDS", 32)


def arguments(options: SamplingOptions, logits: Tensor, seed: int = 0) -> tuple[Tensor, Draw]:
    """Lanes at places in no order, of each sequence its own, with seeds of 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    batch, lanes, vocab_size = logits.shape
    ranges = ValidRanges.resolve(options.valid_range, HEIGHT, WIDTH, vocab_size, DEVICE)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    packed = [torch.randint(high, (batch, lanes), generator=generator) for high in HIGH]
    places = torch.stack(packed).to(DEVICE).repeat(1, 1, 2)[..., lanes:]  # of wider rows
    return logits.to(DEVICE), Draw(options, ranges, seeds.to(DEVICE), *places)


def by_place(vocab_size: int) -> Tensor:
    low = torch.arange(HEIGHT * WIDTH).view(HEIGHT, WIDTH) % (vocab_size - 4)
    return torch.stack([low, (low + 40).clamp(max=vocab_size)], -1)


@settings(max_examples=9, deadline=None)
@given(
    truncation=st.sampled_from(list(TRUNCATIONS)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    vocab_size=st.integers(5, 140),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    ties=st.booleans(),
    places=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_draw_is_the_samplers(
    truncation, temperature, vocab_size, spread, ties, places, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, vocab_size, generator=generator) * spread
    logits = (logits.round() if ties else logits).to(dtype)[:, 1:]  # of a larger one
    valid_range = by_place(vocab_size) if places else (1, vocab_size)
    options = SamplingOptions(temperature, valid_range=valid_range, **TRUNCATIONS[truncation])
    given = arguments(options, logits, seed)
    assert torch.equal(draw(*given), sample(*given))


@pytest.mark.parametrize("places", [False, True])
def test_greedy_takes_the_lowest_of_the_best(places):
    logits = torch.randn(2, 6, 100, generator=torch.Generator().manual_seed(0)).round()
    options = SamplingOptions(valid_range=by_place(100) if places else None)
    given = arguments(options, logits)
    assert torch.equal(draw(*given), sample(*given))


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_where_logits_are_broken_nothing_is_drawn(truncation):
    logits = torch.randn(1, 6, 70, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 60] = torch.nan
    logits[0, 1, 5] = torch.inf
    logits[0, 2] = -torch.inf
    logits[0, 3, 6:] = -torch.inf  # one is left
    logits[0, 4, :5], logits[0, 4, 68:] = torch.nan, torch.inf  # not valid
    options = SamplingOptions(0.9, valid_range=(5, 68), **TRUNCATIONS[truncation])
    given = arguments(options, logits)
    drawn = draw(*given)
    assert torch.equal(drawn, sample(*given))
    assert drawn[0, :4].tolist() == [UNDRAWN] * 3 + [5]
    assert drawn[0, 4] != UNDRAWN


def test_what_ties_with_the_last_kept_is_kept_and_both_zeros_are_one():
    logits = torch.tensor([0.0, -0.0, 1.0, -0.0, 0.0, -1.0]).expand(1, 12, 6)
    given = arguments(SamplingOptions(3.0, top_k=2), logits)
    drawn = draw(*given)
    assert torch.equal(drawn, sample(*given))
    assert set(drawn.flatten().tolist()) == {0, 1, 2, 3, 4}


def test_a_vocabulary_that_is_nearly_flat_is_cut_again_and_again():
    """Many draws are thrown away, each is ranked before the last."""
    logits = torch.linspace(0, 1e-3, 120).roll(50).expand(1, 3, 120)
    given = arguments(SamplingOptions(1.0, top_p=0.02), logits)
    assert torch.equal(draw(*given), sample(*given))


def test_large_noise_keeps_its_digits(monkeypatch):
    """Noise decides by its far end, where a logarithm of one minus little would lose all."""
    monkeypatch.setattr(sampling, "MAX_IDS", 1024)
    ids = 3000
    seeds, lanes = torch.arange(1, device=DEVICE), torch.arange(1, device=DEVICE)
    noise = noise_of(seeds, lanes, lanes, lanes, 0, ids)[0, 0].double().cpu()
    best = noise.argsort(descending=True)[:6]
    logits = torch.full((1, 1, ids), -30.0)
    for first, second in itertools.pairwise(best):
        near = (noise[first] - noise[second]).item()
        for margin, expected in ((-4e-6, first), (4e-6, second)):
            logits[:] = -30.0
            logits[0, 0, first], logits[0, 0, second] = 0.0, near + margin
            drawn = sampling.draw(
                logits.to(DEVICE), None, 0, ids, seeds, lanes, lanes, lanes, 1.0, 0, 1.0, False
            )
            assert drawn.item() == expected.item()
