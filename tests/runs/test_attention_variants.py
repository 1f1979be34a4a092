"""The variants of attention against the attention of the models, on the CPU."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from diagd.models.attention import attend
from runs.attention_variants import (
    efficient_partial,
    flex,
    join,
    masked,
    merged,
    plain_partial,
)

LANES, KEYS, PREFIX = 7, 53, 40


def states(num_heads=6, num_kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, num_heads, LANES, 16, generator=generator)
    keys, values = torch.randn(2, 2, num_kv_heads, KEYS, 16, generator=generator)
    visible = torch.rand(LANES, KEYS, generator=generator) < 0.4
    visible[:, :PREFIX] = True
    visible[2, PREFIX:] = False  # a lane that sees nothing of the frames under way
    return queries, keys, values, visible


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    "variant", [masked(SDPBackend.MATH), merged(plain_partial), flex(compiled=False)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_variant_is_the_attention_of_the_models(variant, num_kv_heads):
    queries, keys, values, visible = states(num_kv_heads=num_kv_heads)
    found = variant(queries, keys, values, visible, PREFIX)
    torch.testing.assert_close(found, attend(queries, keys, values, visible))


@pytest.mark.parametrize("cut", [1, 20, 52])
def test_halves_joined_by_their_log_sum_exp_are_the_whole(cut):
    queries, keys, values, _ = states(num_kv_heads=6)
    halves = [
        plain_partial(queries, keys[:, :, part], values[:, :, part], None)
        for part in (slice(cut), slice(cut, None))
    ]
    whole, lse = plain_partial(queries, keys, values, None)
    torch.testing.assert_close(join(*halves[0], *halves[1]), whole)
    torch.testing.assert_close(torch.logaddexp(halves[0][1], halves[1][1]), lse)


def test_a_kernel_that_is_not_there_is_an_error_and_no_other_runs():
    with pytest.raises(RuntimeError, match=r"[Nn]o available kernel|No viable backend"):
        masked(SDPBackend.CUDNN_ATTENTION)(*states(), PREFIX)


@pytest.mark.gpu
def test_the_efficient_kernel_gives_its_log_sum_exp():
    queries, keys, values, visible = (state.cuda() for state in states(num_kv_heads=6))
    for mask in (None, visible):
        found = efficient_partial(queries, keys, values, mask)
        expected = plain_partial(queries, keys, values, mask)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
