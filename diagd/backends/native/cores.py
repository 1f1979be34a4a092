"""How many cores this process may use: what it is bound to, and a container's quota."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


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
