"""Number types by name, and what `auto` is here."""

from types import SimpleNamespace

import pytest
import torch

from diagd.backends.devices import cpu_features, dtype_of, multiplies_bfloat16
from diagd.backends.prepare import choose_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
def test_a_number_type_that_is_named_stays(name):
    assert choose_dtype(name, CPU) == name


@pytest.mark.parametrize(
    ("features", "does"),
    [
        ({}, False),
        ({"avx2": True, "avx512_f": True, "amx_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
    ],
)
def test_a_processor_tells_whether_it_multiplies_bfloat16(features, does, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert multiplies_bfloat16(CPU) is does


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_auto_on_a_gpu_is_bfloat16_where_it_multiplies_that(capability, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_dtype("auto", torch.device("cuda")) == chosen


@pytest.mark.parametrize("has_amx", [True, False])
def test_an_older_torch_is_asked_in_its_own_words(has_amx, monkeypatch):
    older = SimpleNamespace(_is_avx2_supported=bool, _is_amx_tile_supported=lambda: has_amx)
    monkeypatch.setattr(torch, "cpu", older)
    features = cpu_features()
    assert features["amx_bf16"] == features["amx_int8"] == has_amx
    assert not features["avx2"]
    assert not features["avx512_bf16"]
    assert multiplies_bfloat16(CPU) is has_amx


def test_int8_is_rounded_from_float32():
    assert dtype_of("int8") == torch.float32
    assert dtype_of("bfloat16") == torch.bfloat16
