"""What differs between operating systems: locks that end with their process, and memory's peak.

No other module but the decoder of uploads, which runs alone, imports what only Unix has.
"""

import ctypes
import hashlib
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

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


def check_memory(num_bytes: int, what: str) -> None:
    """Refuse what is larger than this machine's memory.

    Args:
        what: the subject of the error, with the sizes that were asked for.

    Raises:
        ValueError: it would never fit; says what was asked for and what there is.
    """
    memory = psutil.virtual_memory().total
    if num_bytes > memory:
        raise ValueError(
            f"{what} would take {_gigabytes(num_bytes)}, this machine has {_gigabytes(memory)}"
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


_ROOT = Path(__file__).resolve().parent.parent
_MODEL_SUFFIXES = (".safetensors", ".json", ".yaml", ".pt", ".pth", ".ckpt", ".jit")


def provenance(device: Any) -> dict[str, Any]:
    """Return commit, device (of torch), torch version and threads, ready for a JSON file."""
    import torch  # here, for flags are refused without it

    on_cuda = device.type == "cuda"
    return {
        "commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def settings_of(options: Any) -> dict[str, str]:
    """Spell the fields of a script's options, a dataclass, without those that are paths.

    Where files lay on one machine says nothing about what was measured.
    """
    values = ((field.name, getattr(options, field.name)) for field in fields(options))
    return {name: str(value) for name, value in values if not isinstance(value, Path)}


def git_commit(root: Path = _ROOT) -> str | None:
    """Return the commit of a checkout, with `-dirty` where files differ; None outside of one."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Return the processor's name and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def fingerprint(model: Path) -> str:
    """Return 12 hex digits that stand for a model: SHA-256 over its file, or the files of a folder.

    Of a folder, weights and configs count.
    """
    digest = hashlib.sha256()
    for path in [model] if model.is_file() else sorted(model.rglob("*")):
        if path == model or (path.suffix in _MODEL_SUFFIXES and path.is_file()):
            digest.update(str(path.relative_to(model)).encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def clip_fingerprint(video: Path) -> str:
    """Return hex digits that stand for a clip: its file, and its actions if they lie beside it."""
    parts = (video, video.with_suffix(".jsonl"))
    return "-".join(fingerprint(part) for part in parts if part.is_file())


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads of this process can run at once, at least 1.

    Args:
        root: Of the file system in which Linux tells of control groups (version 1 or 2).
    """
    bound = getattr(os, "sched_getaffinity", None)
    cores = len(bound(0)) if bound else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield every limit on this process's time, in cores: of its group, and of those above."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _quota(folder)
            if folder == top:
                break


def _quota(folder: Path) -> Iterator[float]:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            quota, period = map(float, text.split())
        except (OSError, ValueError):  # another version's files, or "max": no limit
            continue
        if quota > 0:
            yield quota / period
