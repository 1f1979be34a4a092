"""The kernels that are used here: the best that pass their test, kept in the user's cache folder.

Prebuilt variants come first, from the best that the processor can run, then a build by the
compiler at hand. What passes `self_test`, in a process of its own, gets its name in the cache in
one move: `kernels-CHOICE-NAME-DIGEST.so`, which is what there was to choose from, which of it this
is, and the SHA-256 of the file. So whatever bears a digest that is its own is whole and trusted,
and what failed is not tried again.
Processes that choose at the same time do the same work twice and keep one result.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from diagd.backends.native.compiler import (
    build,
    describe_build,
    find_compiler,
    own_flags,
    run_to_end,
)
from diagd.backends.native.variants import prebuilt_here

logger = logging.getLogger("diagd")
BUILT = "built"  # the name of what a compiler built here


def load_library() -> ctypes.CDLL:
    """Return the kernels, tested on first use (some seconds; about twenty where they are built).

    Raises:
        OSError: None are prebuilt for this machine, and there is no compiler, or it fails, or what
            it built does; the message says which. It is not tried a second time by this process.
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
    """Return the kernels for this machine, tested now where none in the cache are whole.

    Raises:
        OSError: As `load_library`.
    """
    kept = find_kept()
    if kept is not None:
        return kept
    for name, path in _prebuilt().items():
        try:
            return _keep(name, path)
        except OSError as error:
            logger.warning("%s: trying the next best", error)
    return _keep(BUILT, None)


def find_kept() -> Path | None:
    """Return the kernels that are in the cache, whole and tested, if there are any."""
    for path in cache_folder().glob(f"kernels-{_choice()}-*.so"):
        if path.stem.endswith(_digest(path.read_bytes())):
            return path
        logger.warning("%s: damaged, so the kernels are made again", path)
    return None


def say_origin() -> str:
    """Say where the kernels that are used come from.

    Raises:
        OSError: As `load_library`.
    """
    name = find_or_make().stem.split("-")[2]
    return f"built here by {find_compiler()}" if name == BUILT else f"prebuilt for {name}"


def cache_folder() -> Path:
    """Return the folder that keeps the kernels, there or not."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "diagd"


def _keep(name: str, prebuilt: Path | None) -> Path:
    """Test prebuilt kernels, or such as are built now, and put them into the cache."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".testing-", dir=folder) as scratch:
        fresh = Path(scratch) / "kernels.so"
        if prebuilt is None:
            build(fresh)
            origin = f"the kernels that {find_compiler()} built"
        else:
            shutil.copyfile(prebuilt, fresh)
            origin = f"the prebuilt kernels for {name}"
        digest = _digest(fresh.read_bytes())
        test = [sys.executable, "-m", "diagd.backends.native.self_test", str(fresh)]
        run_to_end(test, f"{origin} fail their test")
        target = folder / f"kernels-{_choice()}-{name}-{digest}.so"
        os.replace(fresh, target)
    return target


def _prebuilt() -> dict[str, Path]:
    return {} if own_flags() else prebuilt_here()  # flags are for a build


def _choice() -> str:
    """Name what there is to choose from."""
    prebuilt = [path.read_bytes() for path in _prebuilt().values()]
    return _digest(b"\0".join([*prebuilt, *describe_build()]))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
