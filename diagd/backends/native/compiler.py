"""Build the C++ kernels for this very machine, once, and keep them in the user's cache folder.

A build is kept as `kernels-BUILD-DIGEST.so`: what it was built from and for, and the SHA-256 of the
file. It gets that name, in one move, after it has passed `self_test` in a process of its own; so
whatever bears a digest that is its own is whole and trusted, and all else is built again. Builders
at the same time do the same work twice and keep one result.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

logger = logging.getLogger("diagd")

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-ffp-contract=fast", "-pthread", "-shared", "-fPIC")
TIMEOUT = 600.0  # seconds for the compiler, and for the test; on a machine that is busy, too


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: $CXX, c++, g++ or clang++."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def load_library() -> ctypes.CDLL:
    """Return the kernels, built and tested on first use (about twenty seconds).

    Raises:
        OSError: There is no compiler, it fails, or what it built does; the message says which. It
            is not tried a second time by this process.
    """
    found = _library()
    if isinstance(found, OSError):
        raise OSError(str(found))
    return found


@cache
def _library() -> ctypes.CDLL | OSError:
    try:
        return ctypes.CDLL(str(find_or_build()))
    except OSError as error:
        return error


def find_or_build() -> Path:
    """Return the build for this machine, a fresh one where none in the cache is whole.

    Raises:
        OSError: As `load_library`.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler found (set CXX, or install g++)")
    return find_build(compiler) or _build(compiler)


def find_build(compiler: str) -> Path | None:
    """Return the build of a compiler that is in the cache, whole and tested, if there is one."""
    for path in cache_folder().glob(f"kernels-{_fingerprint(compiler)}-*.so"):
        if path.stem.endswith(_digest(path.read_bytes())):
            return path
        logger.warning("%s: damaged, so the kernels are built again", path)
    return None


def cache_folder() -> Path:
    """Return the folder that keeps the builds, there or not."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "diagd"


def _build(compiler: str) -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
        fresh = Path(scratch) / "kernels.so"
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        complaint = f"{compiler} could not build the kernels"
        _run([compiler, *_flags(), *sources, "-o", str(fresh)], complaint)
        content = fresh.read_bytes() if fresh.is_file() else b""
        if not content:
            raise OSError(f"{complaint}: it wrote nothing")
        test = [sys.executable, "-m", "diagd.backends.native.self_test", str(fresh)]
        _run(test, f"the kernels that {compiler} built fail their test")
        target = folder / f"kernels-{_fingerprint(compiler)}-{_digest(content)}.so"
        os.replace(fresh, target)
    return target


def _run(command: list[str], complaint: str) -> None:
    """Run a command to its end, or raise OSError with its first error in one line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with psutil.Popen(command, stdout=pipe, stderr=pipe, errors="replace", env=environment) as run:
        try:
            _, text = run.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            for process in (*run.children(recursive=True), run):
                process.kill()
            raise OSError(f"{complaint}: not done after {TIMEOUT:g} seconds") from None
    if run.returncode:
        said = [line.strip() for line in text.splitlines() if line.strip()]
        status = run.returncode
        ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        errors = [line for line in said if "error" in line.lower()]
        raise OSError(f"{complaint}: {(errors or said or [ended])[0]}")


def _flags() -> list[str]:
    """Return the compiler's flags; $DIAGD_CXXFLAGS has more, for sanitizers."""
    return [*FLAGS, *shlex.split(os.environ.get("DIAGD_CXXFLAGS", ""))]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _fingerprint(compiler: str) -> str:
    """Name what the build depends on: sources, flags, compiler, processor."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts += [" ".join(_flags()).encode(), compiler.encode()]
    parts += [str(os.stat(compiler).st_mtime).encode(), platform.machine().encode()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return _digest(b"\0".join(parts))
