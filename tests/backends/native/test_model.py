"""Our C++ kernels against the PyTorch model, and against themselves with other step widths."""

import pytest
import torch

from diagd.backends.native.model import NativeModel
from diagd.decoding.sampling import SamplingOptions, ValidRanges, sample
from tests.models.feeding import feed, scrambled_steps, visible_under
from tests.models.tiny import KINDS, random_tokens, tiny_model

# float32: another order of summation; the others keep 8 bits of weights and cache
TOLERANCE = {"float32": 5e-6, "bfloat16": 0.06, "int8": 0.08}


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scrambled_feeding_equals_the_pytorch_model(kind, weights):
    model = tiny_model(**KINDS[kind])
    tokens, steps = random_tokens(2, 61), scrambled_steps(61, num_steps=6)
    expected = model.logits(tokens, visible=visible_under(steps))
    fed = feed(NativeModel(model, weights), tokens, steps)
    torch.testing.assert_close(fed, expected, atol=TOLERANCE[weights], rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 40, "num_heads": 5, "num_kv_heads": 5, "head_dim": 34},
        {"intermediate_size": 33, "num_heads": 3, "num_kv_heads": 1, "head_dim": 70},
        {"num_layers": 1, "head_dim": 32, "hidden_size": 96, "vocab_size": 65},
    ],
)
@torch.no_grad()
def test_sizes_that_fill_no_block_are_padded(changes):
    model, tokens = tiny_model(**changes), random_tokens(1, 50)
    fed = feed(NativeModel(model), tokens, torch.arange(50) // 3)
    torch.testing.assert_close(fed, model.logits(tokens), atol=5e-6, rtol=0)


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_logits_do_not_depend_on_how_many_lanes_share_a_step(weights, num_kv_heads):
    model = tiny_model(**{**KINDS["world"], "num_kv_heads": num_kv_heads})
    native, tokens = NativeModel(model, weights), random_tokens(1, 40)
    one_by_one = feed(native, tokens, torch.arange(40))
    for width in (2, 3, 13, 14, 15, 40):
        assert torch.equal(feed(native, tokens, torch.arange(40) // width), one_by_one), width


def test_threads_change_nothing():
    native, tokens = NativeModel(tiny_model()), random_tokens(2, 30)
    alone = feed(native, tokens, torch.arange(30) // 5)
    torch.set_num_threads(3)
    try:
        assert torch.equal(feed(native, tokens, torch.arange(30) // 5), alone)
    finally:
        torch.set_num_threads(1)


def test_only_the_last_logits_are_kept_when_asked():
    native, tokens = NativeModel(tiny_model()), random_tokens(2, 7)
    cache, slots = native.make_cache(2, 9), torch.arange(7)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    every = native.forward(tokens, slots, slots, visible, cache)
    last = native.forward(tokens, slots, slots, visible, cache, logits_to_keep=2)
    assert torch.equal(last, every[:, -2:])


def test_a_lane_that_sees_nothing_poisons_nobody():
    native, tokens = NativeModel(tiny_model()), random_tokens(1, 2)
    cache, slots = native.make_cache(1, 4), torch.arange(2)
    visible = torch.tensor([[True, False], [False, False]])
    assert native.forward(tokens, slots, slots, visible, cache).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([[0, 50]])}, "a token, position or slot is out of range"),
        ({"positions": torch.tensor([0, 64])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([-1, 0])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([0, 5])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([0.0, 1.0])}, "must be int64, and visible bool"),
        ({"visible": torch.ones(2, 2)}, "must be int64, and visible bool"),
    ],
)
def test_indices_out_of_range_are_refused_before_memory_is_touched(changes, message):
    native = NativeModel(tiny_model())
    step = {
        "tokens": torch.zeros(1, 2, dtype=torch.int64),
        "positions": torch.arange(2),
        "slots": torch.arange(2),
        "visible": torch.ones(2, 2, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        native.forward(**{**step, **changes}, cache=native.make_cache(1, 5))


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="weights must be one of float32, bfloat16, int8, got 'x'"):
        NativeModel(tiny_model(), "x")  # pyright: ignore[reportArgumentType]
    native = NativeModel(tiny_model())
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 1 and 0"):
        native.make_cache(1, 0)
    with pytest.raises(ValueError, match="context must be None"):
        native.make_cache(1, 1, torch.zeros(1))


SAMPLINGS = (
    SamplingOptions(),
    SamplingOptions(1.0),
    SamplingOptions(0.7, top_k=20),
    SamplingOptions(1.0, top_p=0.9),
    SamplingOptions(1.3, top_k=30, top_p=0.5, valid_range=(5, 40)),
    SamplingOptions(2.0, top_k=1),
)


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("vocab_size", [50, 1030])
def test_the_sampler_draws_what_the_pytorch_one_draws(vocab_size, options):
    generator = torch.Generator().manual_seed(0)
    native = NativeModel(tiny_model())
    ranges = ValidRanges.resolve(options.valid_range, 14, 24, vocab_size, torch.device("cpu"))
    seeds = torch.tensor([1, 2**40 + 3, -5])
    places = torch.arange(14) + 3, torch.arange(14), torch.arange(14) * 3 % 24
    for spread in (0.1, 1, 3, 10):
        logits = torch.randn(3, 14, vocab_size, generator=generator) * spread
        if spread == 3:
            logits = logits.round()  # ties
        expected = sample(logits, options, ranges, seeds, *places)
        assert torch.equal(native.sample(logits, options, ranges, seeds, *places), expected)


def test_the_sampler_keeps_to_the_range_of_each_place():
    low = torch.arange(6).view(2, 3) * 4
    valid = torch.stack([low, low + 3], dim=-1)
    options = SamplingOptions(1.0, valid_range=valid)
    ranges = ValidRanges.resolve(valid, 2, 3, 50, torch.device("cpu"))
    rows, columns = torch.arange(6) // 3, torch.arange(6) % 3
    logits = torch.randn(40, 6, 50, generator=torch.Generator().manual_seed(1))
    arguments = options, ranges, torch.arange(40), torch.zeros_like(rows), rows, columns
    drawn = NativeModel(tiny_model()).sample(logits, *arguments)
    assert torch.equal(drawn, sample(logits, *arguments))
    assert ((drawn >= low.flatten()) & (drawn < low.flatten() + 3)).all()
