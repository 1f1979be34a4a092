"""What differs between operating systems: locks that end with their process, and memory's peak.

No other module but the decoder of uploads, which runs alone, imports what only Unix has.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

_TRIM_THRESHOLD, _MOST_MAPPED = -1, -4  # glibc's M_TRIM_THRESHOLD and M_MMAP_MAX


@contextmanager
def only_writer(folder: Path, file: str = "") -> Iterator[None]:
    """Make a folder, and be the only one who writes there while the block runs.

    The system gives the lock back when the process ends, however it ends. A folder that is empty
    afterwards, and was not there before, is removed again, and so are the half-written files of one
    who was killed (see `diagd.files`). Processes that torchrun or accelerate
    started together are one writer: the first holds the lock, the others need none.

    Args:
        file: of the folder, where others may write to other files of it meanwhile.

    Raises:
        ValueError: another process writes there.
        OSError: the folder cannot be made or written to.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{file or 'diagd'}.lock"
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(
                f"{folder / file} is being written by another process: wait for it, or choose "
                "another folder"
            ) from None
        try:
            for rubbish in () if file else folder.glob(".*.partial"):  # of a writer that was killed
                rubbish.unlink(missing_ok=True)
            yield
        finally:
            with suppress(PermissionError):  # Windows removes it once it is unlocked, Unix before
                path.unlink(missing_ok=True)
            lock.release()
    finally:
        for each in missing:
            with suppress(OSError):  # something lies there
                each.rmdir()


def process_peak_bytes() -> int:
    """Return the most memory that this process has held at once."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for a loop whose rounds need the same again.

    glibc gives large blocks back at once, so every training step would have its pages mapped and
    cleared anew. Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MOST_MAPPED, 0)
            mallopt(_TRIM_THRESHOLD, -1)
