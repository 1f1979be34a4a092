"""Number types by name, and what `auto` is here."""

import pytest
import torch

from diagd.backends import devices
from diagd.backends.devices import choose_dtype, cpu_features, dtype_of, multiplies_bfloat16

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
def test_a_number_type_that_is_named_stays(name):
    assert choose_dtype(name, CPU) == name


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ({}, "float32"),
        ({"avx2": True, "avx512_f": True, "amx_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(features, chosen, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert choose_dtype("auto", CPU) == chosen


def test_an_older_torch_is_asked_in_its_own_words(monkeypatch):
    newest = cpu_features()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    older = cpu_features()
    assert set(older) == set(devices.BFLOAT16_UNITS)
    if newest.keys() >= older.keys():
        assert multiplies_bfloat16(CPU) == any(newest[unit] for unit in older)


def test_int8_is_rounded_from_float32():
    assert dtype_of("int8") == torch.float32
    assert dtype_of("bfloat16") == torch.bfloat16
