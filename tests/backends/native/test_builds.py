"""What compilers make of the kernels: the same bits for every processor, and about one speed."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from diagd.backends.devices import cpu_features
from diagd.backends.native.compiler import SOURCES
from diagd.backends.native.library import load_library
from diagd.backends.native.model import NativeModel
from diagd.models.transformer import Transformer
from runs import compilers
from tests.models.feeding import feed
from tests.models.tiny import random_tokens, tiny_model, with_outliers

x86_64_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="-march of x86-64")


def logits_of(model: Transformer, library: ctypes.CDLL, weights) -> torch.Tensor:
    tokens = random_tokens(2, 48)
    return feed(NativeModel(model, weights, library=library), tokens, torch.arange(48) // 7)


@x86_64_only
@pytest.mark.parametrize(
    "march",
    [
        pytest.param("x86-64-v2", marks=pytest.mark.slow),
        pytest.param(
            "x86-64-v3",
            marks=pytest.mark.skipif(
                not cpu_features().get("avx512_vl"), reason="this processor has no more than that"
            ),
        ),
    ],
)
def test_int8_computes_the_same_bits_for_every_processor(march, tmp_path):
    """Narrower vectors, other instructions, and (v2) no fused products."""
    ((library, _),) = compilers.build_all(("c++",), march, tmp_path).values()
    model = tiny_model(num_kv_heads=2)
    for one in (model, with_outliers(tiny_model(seed=1))):
        there, here = (logits_of(one, kernels, "int8") for kernels in (library, load_library()))
        assert torch.equal(there, here)
    if march != "x86-64-v2" and cpu_features().get("avx2"):
        there, here = (logits_of(model, one, "float32") for one in (library, load_library()))
        assert torch.equal(there, here)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("march", [pytest.param("x86-64-v3", marks=x86_64_only), "native"])
def test_products_of_many_rows_fetch_the_weights_that_come_next_and_no_others(march, tmp_path):
    """Each chunk of rows a share of every line, but for the row before a block of int8."""
    program, source = tmp_path / "ahead", Path(__file__).parent / "ahead.cpp"
    flags = ["-std=c++20", "-O1", f"-march={march}", f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, source, "-o", program], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [beyond for _, beyond in counts] == [0] * 4
    assert [left_out for left_out, _ in counts[:3]] == [0] * 3
    assert counts[3][0] <= 10


@x86_64_only
@pytest.mark.slow
@pytest.mark.parametrize("march", ["x86-64-v3", "native"])
def test_compilers_agree_on_the_speed_of_a_diagonal(march, tmp_path):
    builds = compilers.build_all(compilers.COMPILERS, march, tmp_path)
    if len(builds) < 2:
        pytest.skip("needs a second compiler: clang++ or ziglang")
    for dtype in ("float32", "int8"):
        rows = compilers.time_builds(builds, "doom", dtype, 3.0)
        for seen in {row["seen"] for row in rows}:
            least = {
                row["by"]: row["least"]
                for row in rows
                if row["by"] != "pytorch" and (row["seen"], row["lanes"]) == (seen, 14)
            }
            assert max(least.values()) <= 1.15 * min(least.values()), (dtype, seen, least)
