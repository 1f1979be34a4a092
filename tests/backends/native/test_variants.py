"""Prebuilt kernels: the best of those that this processor runs and that pass their test."""

import re
import shutil
import subprocess

import pytest
import torch
import torch._inductor.config  # it reads CXX when it is imported, once

from diagd.backends.devices import cpu_features
from diagd.backends.native import compiler, library
from diagd.backends.native.model import NativeModel
from runs import wheels
from tests.models.feeding import feed
from tests.models.tiny import random_tokens, tiny_model

HASWELL = {"avx2": True, "fma3": True}
SKYLAKE = {**HASWELL, "avx512_f": True, "avx512_vl": True}
ICE_LAKE = {**SKYLAKE, "avx512_vnni": True}
ALDER_LAKE = {**HASWELL, "avx_vnni": True}
ZEN_4 = {**ICE_LAKE, "avx512_bf16": True}
SAPPHIRE_RAPIDS = {**ZEN_4, "amx_bf16": True, "amx_int8": True, "amx_tile": True}


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    """Return the folder of a wheel that has right kernels for AVX2, and an empty cache."""
    right = library.find_or_make()
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    shutil.copyfile(right, folder / "avx2.so")
    monkeypatch.setattr(library, "PREBUILT", folder)
    monkeypatch.setattr(library, "cpu_features", lambda: SKYLAKE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DIAGD_CXXFLAGS", raising=False)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")  # no compiler
    monkeypatch.setattr(library, "zig", lambda: None)
    library._library.cache_clear()
    yield folder
    library._library.cache_clear()


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({}, ["neon"]),
        (HASWELL, ["avx2", "neon"]),
        (ALDER_LAKE, ["avxvnni", "avx2", "neon"]),
        (SKYLAKE, ["avx512", "avx2", "neon"]),
        (ICE_LAKE, ["avx512vnni", "avx512", "avx2", "neon"]),
        (ZEN_4, ["avx512bf16", "avx512vnni", "avx512", "avx2", "neon"]),
        (SAPPHIRE_RAPIDS, ["amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "neon"]),
        (
            SAPPHIRE_RAPIDS | {"amx_int8": False},
            ["avx512bf16", "avx512vnni", "avx512", "avx2", "neon"],
        ),
    ],
)
def test_what_a_processor_has_decides_the_best_first(features, names, tmp_path, monkeypatch):
    """Were there a file of every variant; a wheel has those of one kind of processor."""
    monkeypatch.setattr(library, "cpu_features", lambda: features)
    for name in library.VARIANTS:
        (tmp_path / f"{name}.so").touch()
    assert list(library.prebuilt_here(tmp_path)) == names


def test_every_need_is_a_word_of_torch():
    known = cpu_features()
    if not known.get("avx2"):
        pytest.skip("torch tells of other words here")
    assert {need for needs in library.VARIANTS.values() for need in needs} <= set(known)


def test_every_variant_has_its_features_to_compile_for():
    assert list(wheels.FEATURES) == list(library.VARIANTS)


@pytest.fixture(scope="module")
def illegal(tmp_path_factory):
    """Return kernels of which the first instruction is none of this processor's."""
    path = tmp_path_factory.mktemp("illegal") / "kernels.so"
    source = "int records(void) { __builtin_trap(); }"
    command = [compiler.find_compiler() or "c++", "-shared", "-fPIC", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_without_a_compiler_the_next_best_of_a_variant_that_fails_is_used(
    illegal, prebuilt, caplog
):
    shutil.copyfile(illegal, prebuilt / "avx512.so")
    model = tiny_model()
    tokens, steps = random_tokens(2, 30), torch.arange(30) // 5
    torch.testing.assert_close(feed(NativeModel(model), tokens, steps), feed(model, tokens, steps))
    (warning,) = caplog.messages
    complaint = "prebuilt kernels for avx512 failed their test: ended by SIG(ILL|TRAP)"
    assert re.fullmatch(f"{complaint}: trying the next best", warning)
    (kept,) = library.cache_folder().glob("*.so")
    assert "-avx2-" in kept.name
    assert library.find_or_make() == kept
    assert library.say_origin() == "prebuilt for avx2"
    assert len(caplog.messages) == 1


def test_where_no_variant_passes_the_compiler_is_asked(prebuilt, caplog):
    (prebuilt / "avx2.so").write_text("not a library")
    with pytest.raises(OSError, match=r"no C\+\+ compiler found"):
        library.find_or_make()
    assert re.search("prebuilt kernels for avx2 failed their test: .*file too short", caplog.text)
    assert [path.name for path in library.cache_folder().iterdir()] == [".kernels.lock"]


def test_flags_are_for_a_build(prebuilt, monkeypatch):
    monkeypatch.setenv("DIAGD_CXXFLAGS", "-march=x86-64-v3")
    with pytest.raises(OSError, match=r"no C\+\+ compiler found"):
        library.find_or_make()
