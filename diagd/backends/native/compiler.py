"""Build the C++ kernels for this machine with an installed compiler."""

import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from diagd.files import encoded, naming

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
TIMEOUT = 600.0  # seconds for the compiler, and for the test; enough for a busy machine


def find_compiler() -> str | None:
    """Return the path of a C++ compiler: $CXX, c++, g++ or clang++."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def own_flags() -> list[str]:  # for sanitizers, or for another processor
    with naming("DIAGD_CXXFLAGS"):
        return shlex.split(os.environ.get("DIAGD_CXXFLAGS", ""))


def zig() -> list[str] | None:
    """Return the command of Zig's C++ compiler, which is a package (`pip install ziglang`)."""
    there = importlib.util.find_spec("ziglang") and not own_flags()  # those are flags of g++
    return [sys.executable, "-m", "ziglang", "c++"] if there else None


def build(target: Path, compiler: list[str]) -> None:
    complaint = f"{' '.join(compiler)} could not build the kernels"
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    run_to_end([*compiler, *_flags(), *sources, "-o", str(target)], complaint)
    if not target.is_file() or not target.stat().st_size:
        raise OSError(f"{complaint}: no output file")


def describe_build() -> list[bytes]:
    """Return everything that a build depends on: sources, flags, compiler, processor."""
    parts = [path.read_bytes() for path in sorted(SOURCES.glob("*.*"))]
    parts += [encoded(" ".join(_flags())), platform.machine().encode(), repr(zig()).encode()]
    if (compiler := find_compiler()) is not None:
        parts += [encoded(compiler), str(os.stat(compiler).st_mtime).encode()]
    if (info := Path("/proc/cpuinfo")).is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return parts


def run_to_end(command: list[str], complaint: str) -> str:
    """Run a command and return its output, or raise OSError with its first error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with psutil.Popen(command, stdout=pipe, stderr=pipe, errors="replace", env=environment) as run:
        try:
            output, text = run.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            for process in (*run.children(recursive=True), run):
                process.kill()
            raise OSError(f"{complaint}: timed out after {TIMEOUT:g} seconds") from None
    if run.returncode:
        status, said = run.returncode, [line.strip() for line in text.splitlines() if line.strip()]
        ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        errors = [line for line in said if "error" in line.lower()]
        raise OSError(f"{complaint}: {(errors or said or [ended])[0]}")
    return output


def _flags() -> list[str]:
    return [*FLAGS, "-march=native", *own_flags()]
