"""`diagd/decoding/sampling.py`: draws follow the distribution, noise belongs to the token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import diagd
from diagd.decoding.sampling import Draw, ValidRanges, sample, truncated_logits
from tests import oracles
from tests.decoding.cases import noise_of

CPU = torch.device("cpu")


def places(num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return frame, row and column of every cell, each (L,)."""
    cells = torch.cartesian_prod(*(torch.arange(size) for size in (num_frames, height, width)))
    return cells[:, 0], cells[:, 1], cells[:, 2]


def draw(
    logits: Tensor, options: diagd.SamplingOptions, seeds: list[int], cells, height: int, width: int
) -> Tensor:
    ranges = ValidRanges.resolve(options.valid_range, height, width, logits.shape[-1], CPU)
    return sample(logits, Draw(options, ranges, torch.tensor(seeds), *cells))


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Return the chance of counts at least this far from the probabilities."""
    counts, probabilities = counts.double(), probabilities.double()
    expected = counts.sum() * probabilities / probabilities.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        *((temperature, None, None) for temperature in (0.5, 1.0, 2.0)),
        *((1.0, 4, None), (1.0, None, 0.6), (1.0, 5, 0.8)),
    ],
)
def test_draws_follow_the_filtered_softmax(temperature, top_k, top_p):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    logits, cells = torch.linspace(-2, 2, 12)[order], places(50, 20, 30)
    options = diagd.SamplingOptions(temperature, top_k, top_p)
    drawn = draw(logits.expand(1, 30000, 12), options, [3], cells, 20, 30)
    counts = torch.bincount(drawn[0], minlength=12)
    kept = oracles.filtered_probabilities(logits.numpy(), temperature, top_k, top_p)
    expected = torch.from_numpy(kept)
    assert (counts[expected == 0] == 0).all()
    assert 1e-3 < chi_square_p(counts[expected > 0], expected[expected > 0]) < 1 - 1e-3


def test_noise_is_standard_gumbel():
    noise = noise_of(torch.tensor([0, 1]), *places(10, 7, 11), 0, 64).double().flatten()
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, 100, 0, 1)
    assert 1e-3 < chi_square_p(counts, torch.ones(100)) < 1 - 1e-3
    # standard errors at 98560 draws: 0.004 for the mean, about 0.013 for the variance
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.016)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("axis", ["seed", "frame", "row", "column", "id"])
def test_neighbours_have_unrelated_noise(axis):
    noise = noise_of(torch.arange(8), *places(8, 8, 8), 0, 8)
    noise = noise.reshape(8, 8, 8, 8, 8).double()
    axis = ["seed", "frame", "row", "column", "id"].index(axis)
    here, there = noise.narrow(axis, 0, 7).flatten(), noise.narrow(axis, 1, 7).flatten()
    correlation = torch.corrcoef(torch.stack([here, there]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(here))  # four standard errors
    assert len(noise.flatten().unique()) > 0.99 * noise.numel()


def test_noise_is_a_function_of_its_own_coordinates_only():
    cells = places(2, 3, 5)
    whole = noise_of(torch.tensor([4, 9, -1]), *cells, 0, 20)
    frames, rows, columns = cells
    one = noise_of(torch.tensor([9]), frames[17:18], rows[17:18], columns[17:18], 6, 11)
    assert torch.equal(whole[1:2, 17:18, 6:11], one)
    assert whole.dtype == torch.float32
    assert whole.shape == (3, 30, 20)
    assert whole.isfinite().all()


def test_large_seeds_count_in_full():
    cells = places(1, 2, 3)
    seeds = torch.tensor([5, 5 + 2**32, 5 - 2**32, 2**63 - 1, -(2**63)])
    noise = noise_of(seeds, *cells, 0, 4)
    for a in range(len(seeds)):
        for b in range(a):
            assert not torch.equal(noise[a], noise[b])


def test_the_noise_never_changes():
    """A seed repeats a run anywhere, so these numbers belong to the file format of our results."""
    place = torch.tensor([[1], [2], [3]])
    noise = noise_of(torch.tensor([0, 7]), place[0], place[1], place[2], 0, 3)
    assert noise.flatten().tolist() == pytest.approx(GOLDEN_NOISE, abs=1e-5)


GOLDEN_NOISE = [-0.33673, 0.19335, -0.99745, 0.15821, -0.42292, -1.01874]

filters = {
    "top_k": st.none() | st.integers(1, 14),
    "top_p": st.none() | st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    "temperature": st.sampled_from([0.3, 1.0, 2.5]),
}


@given(seed=st.integers(0, 10**6), low=st.integers(0, 5), size=st.integers(1, 7), **filters)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_top_k_and_top_p_are_the_numpy_filter(seed, low, size, top_k, top_p, temperature):
    logits = 3 * torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(seed))
    options = diagd.SamplingOptions(temperature, top_k, top_p, (low, low + size))
    ranges, seeds = ValidRanges(low, low + size, None), torch.tensor([seed, seed + 1])
    how = Draw(options, ranges, seeds, *places(1, 2, 2))
    lanes = logits[..., low : low + size].flatten(0, 1).numpy()
    filtered = [oracles.filtered_probabilities(x, temperature, top_k, top_p) for x in lanes]
    kept = torch.from_numpy(np.stack(filtered)).view(2, 4, size)
    assert torch.equal(truncated_logits(logits, how).isfinite(), kept > 0)
    noise = noise_of(seeds, how.frames, how.rows, how.columns, low, low + size)
    assert torch.equal(sample(logits, how), low + (kept.log() + noise).argmax(-1))


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]).expand(2, 6, 5)
    drawn = draw(logits, diagd.SamplingOptions(), [0, 1], places(1, 2, 3), 2, 3)
    assert (drawn == 1).all()
    ranged = diagd.SamplingOptions(valid_range=(2, 5))
    assert (draw(logits, ranged, [0, 1], places(1, 2, 3), 2, 3) == 3).all()


def test_half_precision_logits_are_drawn_in_single():
    logits = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    options = diagd.SamplingOptions(1.0)
    cells = places(1, 2, 3)
    drawn = draw(logits, options, [0, 1], cells, 2, 3)
    assert torch.equal(drawn, draw(logits.float(), options, [0, 1], cells, 2, 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_place_has_its_own_range(temperature):
    ranges = torch.tensor([[[0, 3], [1, 2], [5, 12]], [[11, 12], [0, 12], [4, 6]]])
    logits = torch.randn(4, 60, 12, generator=torch.Generator().manual_seed(3))
    cells = places(10, 2, 3)
    options = diagd.SamplingOptions(temperature, valid_range=ranges)
    drawn = draw(logits, options, [0, 1, 2, 3], cells, 2, 3)
    bounds = ranges[cells[1], cells[2]]
    assert (drawn >= bounds[:, 0]).all()
    assert (drawn < bounds[:, 1]).all()
    same = diagd.SamplingOptions(temperature, valid_range=torch.tensor([2, 9]).expand(2, 3, 2))
    pair = diagd.SamplingOptions(temperature, valid_range=(2, 9))
    assert torch.equal(
        draw(logits, same, [0, 1, 2, 3], cells, 2, 3), draw(logits, pair, [0, 1, 2, 3], cells, 2, 3)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"temperature": 1e-46}, r"temperature above 0 must be at least 2\*\*-100, got 1e-46"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an int of at least 1, got 0"),
        ({"temperature": 1.0, "top_k": 5.0}, "top_k must be an int of at least 1, got 5.0"),
        ({"temperature": 1.0, "top_k": True}, "top_k must be an int of at least 1, got True"),
        ({"temperature": 1.0, "top_p": 1e-50}, r"top_p above 0 must be .*, got 1e-50"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": 3}, "top_k and top_p need a temperature above 0, got temperature 0"),
        ({"top_p": 0.5}, "top_k and top_p need a temperature above 0, got temperature 0"),
    ],
)
def test_options_out_of_range_are_errors(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        diagd.SamplingOptions(**options)


@pytest.mark.parametrize(
    ("valid_range", "message"),
    [
        ((0, 13), r"0 <= low < high <= 12, got low 0\.\.0, high 13\.\.13"),
        ((-1, 5), r"0 <= low < high <= 12, got low -1\.\.-1, high 5\.\.5"),
        ((5, 5), r"0 <= low < high <= 12, got low 5\.\.5, high 5\.\.5"),
        (
            torch.ones(3, 2, 2, dtype=torch.int64),
            r"ids of shape \(2, 3, 2\), .*int64 of shape \(3, 2, 2\)",
        ),
        ((1.5, 3), r"ids of shape \(2, 3, 2\), got torch.float32 of shape \(2,\)"),
    ],
)
def test_ranges_that_do_not_fit_are_errors(valid_range, message):
    with pytest.raises(ValueError, match=f"^valid_range must .*{message}$"):
        ValidRanges.resolve(valid_range, 2, 3, 12, CPU)


def test_what_is_added_to_a_range_of_ids_fits_the_32_bits_that_a_compiler_gives_it():
    """Inductor keeps an `arange` in int32 on CUDA: a larger constant beside it is refused there."""
    place = torch.tensor([1, 2])
    graph = make_fx(noise_of)(torch.tensor([3]), place, place, place, 4, 40).graph
    ranges = [node for node in graph.nodes if node.target is torch.ops.aten.arange.start]
    beside = [arg for node in ranges for user in node.users for arg in user.args if arg != node]
    assert len(beside) == 1
    assert all(-(2**31) <= number < 2**31 for number in beside)
