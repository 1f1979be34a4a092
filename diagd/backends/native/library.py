"""The kernels in use: the fastest of those that pass their test, cached.

Candidates are the best prebuilt variant for the processor (`runs/wheels.py` makes them for wheels),
a build by an installed compiler and, if that is missing or not clearly faster than PyTorch, a build
by Zig. Each passes `self_test`, in a separate process, which also times it; the fastest is renamed
in the cache to `kernels-CHOICE-NAME-DIGEST.so`: the candidates there were, the one this is, and the
SHA-256 of the file. So a file with its own digest in its name is complete and trusted.
`kernels-CHOICE.json` beside it lists the results of all candidates. If several processes start at
the same time, one chooses and the others wait for it.
"""

import ctypes
import hashlib
import json
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from diagd.backends.devices import cpu_features
from diagd.backends.native.compiler import (
    build,
    describe_build,
    find_compiler,
    own_flags,
    run_to_end,
    zig,
)
from diagd.backends.step_times import StepTimes
from diagd.files import write_json

PREBUILT = Path(__file__).parent / "prebuilt"
# Variants of the kernels, the best first, and the processor features that they need, by torch's
# names; each implies its whole generation. The kernels ask Linux for the matrix units themselves.
VARIANTS: dict[str, tuple[str, ...]] = {
    "amx": ("avx512_vl", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    "avx512bf16": ("avx512_vl", "avx512_vnni", "avx512_bf16"),
    "avx512vnni": ("avx512_vl", "avx512_vnni"),
    "avx512": ("avx512_vl",),
    "avxvnni": ("avx2", "avx_vnni"),
    "avx2": ("avx2",),
    "neon": (),  # every 64-bit Arm has it
}


def prebuilt_here(folder: Path | None = None) -> dict[str, Path]:
    """Return the prebuilt kernels for this processor, best first, by variant."""
    features, folder = cpu_features(), folder or PREBUILT
    names = [name for name, needs in VARIANTS.items() if all(map(features.get, needs))]
    return {name: path for name in names if (path := folder / f"{name}.so").is_file()}


logger = logging.getLogger("diagd")
BUILT, ZIG = "built", "zig"  # names of kernels built here
CLEARLY_FASTER = 1.3  # than PyTorch, in a diagonal's step: reached by a good compiler


def load_library() -> ctypes.CDLL:
    """Return the kernels, chosen on first use (about twenty seconds if they must be built).

    Raises OSError with the reason if there are none; this process does not try again.
    """
    found = _library()
    if isinstance(found, OSError):
        raise OSError(str(found))
    return found


@cache
def _library() -> ctypes.CDLL | OSError:
    try:
        return ctypes.CDLL(str(find_or_make()))
    except OSError as error:
        return error


def find_or_make() -> Path:
    """Return the kernels for this machine, chosen now if the cache has no complete ones."""
    if (kept := find_kept()) is not None:
        return kept
    folder, tried = cache_folder(), dict[str, dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".kernels.lock"), TemporaryDirectory("", ".testing-", folder) as scratch:
        if (kept := find_kept()) is not None:  # built by another process meanwhile
            return kept
        for left in folder.glob(".testing-*"):
            if left.name != Path(scratch).name:  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
        for name, path in _prebuilt().items():
            tried[name] = _try(Path(scratch), name, path)
            if "times" in tried[name]:
                break
            logger.warning("%s: trying the next best", tried[name]["problem"])
        if (compiler := find_compiler()) is not None:
            tried[BUILT] = _try(Path(scratch), BUILT, [compiler])
        found = _times(tried).values()
        gains = [one["pytorch"].diagonal_ms / one["ours"].diagonal_ms for one in found]
        if (command := zig()) and max(gains, default=0) < CLEARLY_FASTER:
            tried[ZIG] = _try(Path(scratch), ZIG, command)
        if not (passed := _times(tried)):
            made = [tried[name]["problem"] for name in (ZIG, BUILT) if name in tried]
            raise OSError((made or ["no C++ compiler found (set CXX, or install g++)"])[-1])
        best = min(passed, key=lambda name: passed[name]["ours"].cost)
        fresh = Path(scratch) / f"{best}.so"
        for damaged in folder.glob(f"kernels-{_choice()}-*.so"):
            damaged.unlink()
        target = folder / f"kernels-{_choice()}-{best}-{_digest(fresh.read_bytes())}.so"
        os.replace(fresh, target)
    write_json(folder / f"kernels-{_choice()}.json", tried)
    return target


def _try(scratch: Path, name: str, made_of: Path | list[str]) -> dict[str, Any]:
    """Test and time prebuilt kernels, or those of a compiler."""
    fresh = scratch / f"{name}.so"
    test = [sys.executable, "-m", "diagd.backends.native.self_test", str(fresh)]
    try:
        if isinstance(made_of, Path):
            shutil.copyfile(made_of, fresh)
            origin = f"prebuilt kernels for {name}"
        else:
            build(fresh, made_of)
            origin = f"kernels built by {' '.join(made_of)}"
        output = run_to_end(test, f"{origin} failed their test")
        times = json.loads(output.splitlines()[-1])
        return {"times": {whose: StepTimes(*each) for whose, each in times.items()}}
    except OSError as error:
        return {"problem": str(error)}


def _times(tried: dict[str, dict[str, Any]]) -> dict[str, dict[str, StepTimes]]:
    return {name: one["times"] for name, one in tried.items() if "times" in one}


def candidates_tried() -> dict[str, dict[str, Any]]:
    """Return, by name, the `times` of each candidate when kernels were chosen, or its `problem`."""
    path = cache_folder() / f"kernels-{_choice()}.json"
    with suppress(OSError, ValueError):  # missing or damaged
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def find_kept() -> Path | None:
    for path in cache_folder().glob(f"kernels-{_choice()}-*.so"):
        if path.stem.endswith(_digest(path.read_bytes())):
            return path
        logger.warning("%s: damaged, rebuilding the kernels", path)
    return None


def say_origin() -> str:
    name = find_or_make().stem.split("-")[2]
    makers = {BUILT: find_compiler(), ZIG: "Zig"}
    return f"built here by {makers[name]}" if name in makers else f"prebuilt for {name}"


def cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "diagd")
    except RuntimeError:
        raise OSError("no home folder for the kernel cache: set HOME or XDG_CACHE_HOME") from None


def _prebuilt() -> dict[str, Path]:
    return {} if own_flags() else prebuilt_here()  # flags require a build


def _choice() -> str:
    prebuilt = [path.read_bytes() for path in _prebuilt().values()]
    return _digest(b"\0".join([*prebuilt, *describe_build()]))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
