"""The machine: differences between operating systems (locks, memory, cores), and provenance."""

import ctypes
import hashlib
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's M_TRIM_THRESHOLD and M_MMAP_MAX
_ROOT = Path(__file__).resolve().parent.parent
_MODEL_SUFFIXES = (".safetensors", ".json", ".yaml", ".pt", ".pth", ".ckpt", ".jit")


@contextmanager
def only_writer(folder: Path, file: str = "") -> Iterator[None]:
    """Create a folder, and lock it, or a file in it, against other writers while the block runs.

    The system releases the lock when the process ends, however it ends. A new folder that stays
    empty is removed, and so are half-written files of a killed writer (see `diagd.files`), unless
    others hold a lock. Of processes started together by torchrun or accelerate, the first holds
    the lock for all.
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
            if not file:
                busy = {each.parent for each in folder.rglob(".*.lock") if each != path}
                for rubbish in folder.rglob(".*.????????.partial"):
                    if busy.isdisjoint(rubbish.parents):
                        rubbish.unlink(missing_ok=True)
            yield
        finally:
            with suppress(PermissionError):  # Windows removes it after unlocking, Unix before
                path.unlink(missing_ok=True)
            lock.release()
    finally:
        for each in missing:
            with suppress(OSError):  # it is not empty
                each.rmdir()


def process_peak_bytes() -> int:
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def keep_freed_memory() -> None:
    """Keep freed memory in the process (glibc), to avoid mapping large blocks in each step."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, -1)


def check_memory(num_bytes: int, what: str) -> None:
    """Raise ValueError if an allocation, named by `what`, exceeds what this process can use."""
    if num_bytes > (memory := usable_memory()):
        raise ValueError(
            f"{what} would need {num_bytes / 1e9:,.1f} GB, this machine has {memory / 1e9:,.1f} GB"
        )


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can use, given the control groups in root."""
    limits = (limit for (limit,) in _limits(root, "memory", "memory.max", "memory.limit_in_bytes"))
    return int(min([psutil.virtual_memory().total, *limits]))


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads of this process can run at once, given the control groups in root."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    limits = _limits(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = [quota / period for quota, period in limits if quota > 0]
    return max(1, math.ceil(min([cores, *quotas])))


def _limits(root: Path, controller: str, file: str, *files_v1: str) -> Iterator[list[float]]:
    """Yield the numbers in a file (in those of version 1) of control groups and their parents."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)  # version 1 alone names controllers
        if controllers and controller not in controllers.split(","):
            continue
        names = files_v1 if controllers else (file,)
        group = root / "sys/fs/cgroup" / (controller if controllers else "") / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file; or "max", no limit
                text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
                yield [float(number) for number in text.split()]


def provenance(device: Any) -> dict[str, Any]:
    """Return commit, device (of torch), torch version and threads, ready for a JSON file."""
    import torch  # here: command lines are checked without torch

    return {
        "commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def settings_of(options: Any) -> dict[str, str]:
    """Format the fields of a script's options, without paths of this machine."""
    return {n: str(value) for n, value in vars(options).items() if not isinstance(value, Path)}


def git_commit(root: Path = _ROOT) -> str | None:
    """Return the commit of a checkout, with `-dirty` if files differ; None outside of one."""
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return None
    return done.stdout.strip() or None


def refuse_other_run(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError, beginning with `what`, if a setting differs from the earlier run's."""
    for name, value in before.items():
        if now.get(name) != value:
            raise ValueError(f"{what} {name}={value}, now {now.get(name)}; choose another --out")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def fingerprint(model: Path) -> str:
    """Return 12 hex digits of SHA-256 over a file, or over the weights and configs of a folder."""
    digest = hashlib.sha256()
    for path in [model] if model.is_file() else sorted(model.rglob("*")):
        if path == model or _is_of_model(path, path.relative_to(model)):
            name = str(path.relative_to(model)).encode(errors="backslashreplace")
            digest.update(name + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _is_of_model(path: Path, name: Path) -> bool:
    """Return whether a file is part of a model, and not made in its folder from it."""
    describes_video = path.suffix == ".json" and path.with_suffix(".mp4").is_file()
    is_made = describes_video or path.name == "tune.json" or "training" in name.parts
    return path.suffix in _MODEL_SUFFIXES and path.is_file() and not is_made


def clip_fingerprint(video: Path) -> str:
    """Return the fingerprint of a clip: its video, and its action file if there is one."""
    parts = (video, video.with_suffix(".jsonl"))
    return "-".join(fingerprint(part) for part in parts if part.is_file())
