"""`diagd/backends/linears.py` on the CPU; captured on CUDA: `tests/gpu/test_int8.py`."""

import pytest
import torch
from torch import nn

from diagd.backends.linears import (
    Int8Linear,
    int8_companion,
    merge_linears,
    round_linears,
    round_to_int8,
)
from tests.models.tiny import KINDS, random_tokens, tiny_model


def test_rows_are_rounded_each_by_its_largest_number():
    weight = torch.tensor([[0.5, -1.27, 0.004], [254.0, 1.0, -127.0], [0.0, 0.0, 0.0]])
    rounded, scales = round_to_int8(weight)
    assert rounded.dtype == torch.int8
    assert rounded.tolist() == [[50, -127, 0], [127, 0, -64], [0, 0, 0]]
    torch.testing.assert_close(scales[:2], torch.tensor([0.01, 2.0]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_layer_is_the_layer_with_its_rounded_weight(bias, dtype):
    layer, x = nn.Linear(40, 7, bias=bias), torch.randn(2, 3, 40).to(dtype)
    rounded = Int8Linear(layer).to(dtype)
    assert rounded.weight.dtype == torch.int8
    assert rounded.scales.dtype == torch.float32  # a scale of 8 bits would be off by 0.4%
    layer.weight.data = rounded.weight * rounded.scales[:, None]
    expected = layer(x.float())
    torch.testing.assert_close(rounded(x).float(), expected, atol=0.02, rtol=0.01)
    assert rounded(x).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_is_rounded_merged_or_not(kind):
    tokens = random_tokens(2, 17)
    plain = round_linears(tiny_model(**KINDS[kind]), torch.float32)
    merged = round_linears(merge_linears(tiny_model(**KINDS[kind]), pack=False), torch.float32)
    for model in (plain, merged):
        kinds = {type(module) for module in model.modules()}
        assert Int8Linear in kinds
        assert nn.Linear not in kinds
        assert not any(weight.requires_grad for weight in model.parameters())
    # each output has a scale of its own, so merging changes no weight
    torch.testing.assert_close(plain.logits(tokens), merged.logits(tokens), atol=2e-5, rtol=0)
    exact = tiny_model(**KINDS[kind]).logits(tokens)
    assert 0 < (plain.logits(tokens) - exact).abs().max() < 0.15  # logits reach 10


def test_what_remains_is_never_float16(monkeypatch):
    assert int8_companion(torch.device("cpu")) in (torch.bfloat16, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert int8_companion(torch.device("cuda")) == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert int8_companion(torch.device("cuda")) == torch.bfloat16
