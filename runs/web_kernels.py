"""Build the kernels that run in browsers, with Zig's compiler; a minute or two the first time.

    pip install ziglang
    python runs/web_kernels.py

They are kept in the repository, for users have no such compiler: a browser takes the best of four
that it can run (with 7-bit dot products or not, with threads or not). Zig makes the same bytes on
every machine. A test compares SOURCES, a digest of what they were built from, with what is there.
"""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diagd.backends.native.compiler import SOURCES, run_to_end
from diagd.files import replacing, write_text
from diagd.web.play.export import KERNELS

NAMES = ("decoder.cpp", "sampler.cpp", "fused_step.cpp", "wasm/world.cpp")
# What the standard library is compiled with is the same for all four: that takes a minute.
FLAGS = (
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-O3", "-std=c++20", "-s"),
    "-mcpu=generic+simd128+atomics+bulk_memory+nontrapping_fptoint+sign_ext+mutable_globals",
    *("-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-DNDEBUG"),
    "-Wl,-z,stack-size=1048576",
)
THREADS = (
    "-DTHREADS",
    "-Wl,--import-memory,--shared-memory,--max-memory=1073741824",
    *(
        f"-Wl,--export=__{name}"
        for name in ("stack_pointer", "wasm_init_tls", "tls_size", "tls_align")
    ),
)
VARIANTS = {
    "kernels.wasm": (),
    "kernels-relaxed.wasm": ("-mrelaxed-simd",),
    "kernels-threads.wasm": THREADS,
    "kernels-relaxed-threads.wasm": ("-mrelaxed-simd", *THREADS),
}


def digest() -> str:
    """Return a digest of all that the kernels depend on, the version of Zig apart."""
    headers = sorted(path for path in SOURCES.rglob("*.*") if path.suffix == ".h")
    parts = [path.read_bytes() for path in [*headers, *(SOURCES / name for name in NAMES)]]
    return hashlib.sha256(b"\0".join([*parts, repr((FLAGS, VARIANTS)).encode()])).hexdigest()


def build(name: str, folder: Path = KERNELS) -> None:
    """Build one of `VARIANTS`."""
    sources = [str(SOURCES / source) for source in NAMES]
    with replacing(folder / name) as target:
        command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, *VARIANTS[name], *sources]
        run_to_end([*command, "-o", str(target)], "Zig could not build the kernels")
        target.chmod(0o644)


if __name__ == "__main__":
    first, *rest = VARIANTS
    build(first)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, rest))
    write_text(KERNELS / "SOURCES", digest() + "\n")
