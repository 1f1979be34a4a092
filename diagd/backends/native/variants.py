"""Which prebuilt kernels this processor can run.

All are the same sources, compiled for other instructions. A wheel for a platform has those of its
kind of processor (`runs/wheels.py` makes them); a source checkout has none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from diagd.backends.devices import cpu_features

PREBUILT = Path(__file__).parent / "prebuilt"


class Variant(NamedTuple):
    """Kernels for one kind of processor.

    Attributes:
        needs: what the processor has to have, by torch's names; each stands for all that its
            generation brought. The matrix units are asked of Linux by the kernels themselves.
        features: what it is compiled for, by the names of LLVM.
    """

    name: str
    needs: tuple[str, ...]
    features: tuple[str, ...]


_AVX2 = ("avx2", "fma", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512vnni", "avx512bf16")
VARIANTS = (  # the best first
    Variant(
        "amx",
        ("avx512_vl", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
        (*_BF16, "amx-tile", "amx-bf16", "amx-int8"),
    ),
    Variant("avx512bf16", ("avx512_vl", "avx512_vnni", "avx512_bf16"), _BF16),
    Variant("avx512vnni", ("avx512_vl", "avx512_vnni"), (*_AVX512, "avx512vnni")),
    Variant("avx512", ("avx512_vl",), _AVX512),
    Variant("avxvnni", ("avx2", "avx_vnni"), (*_AVX2, "avxvnni")),
    Variant("avx2", ("avx2",), _AVX2),
    Variant("neon", (), ()),  # every 64-bit Arm has it
)


def prebuilt_here(
    features: Mapping[str, object] | None = None, folder: Path | None = None
) -> dict[str, Path]:
    """Return the prebuilt kernels that a processor can run, the best first, by variant.

    Args:
        features: what the processor has, by torch's names; of this one by default.
        folder: that holds them; by default that of this package.
    """
    features = cpu_features() if features is None else features
    return {
        variant.name: path
        for variant in VARIANTS
        if all(features.get(need) for need in variant.needs)
        and (path := (folder or PREBUILT) / f"{variant.name}.so").is_file()
    }
