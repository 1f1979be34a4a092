"""What only our C++ kernels have to keep; the rest is in `tests/backends/conformance.py`."""

import pytest
import torch

from diagd.backends.native.model import NativeModel
from tests.models.feeding import feed
from tests.models.tiny import random_tokens, tiny_model


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


def test_a_lane_that_sees_nothing_poisons_nobody():
    native, tokens = NativeModel(tiny_model()), random_tokens(1, 2)
    cache, slots = native.make_cache(1, 4), torch.arange(2)
    visible = torch.tensor([[True, False], [False, False]])
    assert native.forward(tokens, slots, slots, visible, cache).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([[0, 50]])}, "a token, position or slot is out of range"),
        ({"positions": torch.tensor([0, -1])}, "a token, position or slot is out of range"),
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
