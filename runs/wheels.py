"""Build wheels for Linux, macOS and Windows, on x86-64 and Arm, with the kernels compiled inside.

Zig's C++ compiler, which comes from PyPI, builds for all of them on any of them:

    pip install -e '.[dev]'
    make wheels                                       # or some of them:
    python runs/wheels.py --platforms linux-x86_64 linux-arm64

A run that was killed goes on: kernels that are in `--kernels` and newer than their sources stay.
"""

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, get_args

import tyro

from diagd.backends.native.compiler import FLAGS, SOURCES
from diagd.backends.native.library import PREBUILT

ROOT = Path(__file__).parent.parent
PlatformName = Literal[
    "linux-x86_64", "linux-arm64", "macos-x86_64", "macos-arm64", "windows-x86_64", "windows-arm64"
]


class Platform(NamedTuple):
    """What a wheel is for: zig's name of it, the wheel's, and the variants of the kernels."""

    zig: str
    tag: str
    variants: tuple[str, ...]


_AVX2 = ("avx2", "fma", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512vnni", "avx512bf16")
FEATURES = {  # what each of `library.VARIANTS` is compiled for, by the names of LLVM
    "amx": (*_BF16, "amx-tile", "amx-bf16", "amx-int8"),
    "avx512bf16": _BF16,
    "avx512vnni": (*_AVX512, "avx512vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avxvnni"),
    "avx2": _AVX2,
    "neon": (),
}
_X86 = ("avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
PLATFORMS: dict[
    PlatformName, Platform
] = {  # versions of glibc and macOS are the lowest that PyTorch's own wheels run on
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64", ("amx", *_X86)),
    "linux-arm64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64", ("neon",)),
    "macos-x86_64": Platform("x86_64-macos.11.0", "macosx_11_0_x86_64", _X86),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", ("neon",)),
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64", _X86),
    "windows-arm64": Platform("aarch64-windows-gnu", "win_arm64", ("neon",)),
}


def this_platform() -> PlatformName:
    """Name the platform of this machine."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine, machine)
    system = platform.system().lower().replace("darwin", "macos")
    return next(name for name in PLATFORMS if name == f"{system}-{machine}")


@dataclass(frozen=True)
class Options:
    """Build wheels, one for each platform."""

    platforms: tuple[PlatformName, ...] = get_args(PlatformName)
    out: Path = ROOT / "dist"  # folder for the wheels
    kernels: Path = ROOT / "build" / "kernels"  # folder for what is compiled


def main(options: Options) -> list[Path]:
    """Compile what is missing, then pack; returns the wheels."""
    for name in options.platforms:
        compile_kernels(PLATFORMS[name], options.kernels / name)
    with TemporaryDirectory() as scratch:
        _run("build", "--outdir", scratch, ROOT)  # from an sdist: no stale build/lib
        (pure,) = Path(scratch).glob("*.whl")
        return [
            pack(pure, PLATFORMS[name], options.kernels / name, options.out)
            for name in options.platforms
        ]


def compile_kernels(platform: Platform, folder: Path) -> None:
    """Compile the variants of a platform that are not in the folder, or older than the sources."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    for name in platform.variants:
        target = folder / f"{name}.so"
        if target.is_file() and target.stat().st_mtime > newest:
            continue
        print(f"{platform.zig}: {name}", flush=True)
        with TemporaryDirectory(dir=folder) as scratch:  # compilers leave more than the library
            flags = ("-target", platform.zig, "-mcpu=baseline", *FLAGS, "-s")
            flags += (*_for_sources(FEATURES[name]), "-o", target.name)  # on macOS kept in it
            _run("ziglang", "c++", *flags, *SOURCES.glob("*.cpp"), folder=scratch)
            (Path(scratch) / target.name).replace(target)


def pack(pure: Path, platform: Platform, kernels: Path, out: Path) -> Path:
    """Put the kernels of a platform into a wheel that has none; returns the wheel for it."""
    with TemporaryDirectory() as scratch:
        _run("wheel", "unpack", pure, "--dest", scratch)
        (tree,) = Path(scratch).iterdir()
        inside = tree / PREBUILT.relative_to(ROOT)
        inside.mkdir()
        for name in platform.variants:
            shutil.copyfile(kernels / f"{name}.so", inside / f"{name}.so")
        _run("wheel", "pack", tree, "--dest-dir", scratch)
        (packed,) = Path(scratch).glob("*.whl")
        _run("wheel", "tags", "--remove", "--platform-tag", platform.tag, packed)
        (packed,) = Path(scratch).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(packed, out / packed.name))


def _for_sources(features: tuple[str, ...]) -> list[str]:
    """Compile our sources for them, but not C++'s own, which starts before anybody has chosen."""
    pairs = (("-target-feature", f"+{feature}") for feature in features)
    return [flag for pair in pairs for word in pair for flag in ("-Xclang", word)]


def _run(module: str, *arguments: str | Path, folder: str | Path = ROOT) -> None:
    """Run a module of Python in a folder, quietly; where it fails, its output is the error."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(f"{module}: {done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":
    try:
        for wheel in main(tyro.cli(Options)):
            print(wheel)
    except OSError as error:
        sys.exit(f"wheels: {error}")
