"""Build the C++ kernels for this very machine, once, and keep them in the user's cache folder."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from diagd.files import replacing

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: $CXX, c++, g++ or clang++."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@cache
def load_library() -> ctypes.CDLL:
    """Return the kernels, built on first use (about ten seconds).

    Raises:
        OSError: There is no compiler, or it fails; the message says which.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler found (set CXX, or install g++)")
    target = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            command = [compiler, *FLAGS, *map(str, SOURCES.glob("*.cpp")), "-o", str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                reason = (lines or done.stderr.splitlines() or ["no message"])[0]
                raise OSError(f"{compiler} could not build the kernels: {reason}")
    return ctypes.CDLL(str(target))


def cache_folder() -> Path:
    """Return where the kernels are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "diagd"


def _fingerprint(compiler: str) -> str:
    """Name what the build depends on: sources, flags, compiler, processor."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts += [" ".join(FLAGS).encode(), compiler.encode(), str(os.stat(compiler).st_mtime).encode()]
    parts.append(platform.machine().encode())
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
