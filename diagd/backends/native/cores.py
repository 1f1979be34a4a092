"""How many cores this process may use: what it is bound to, and a container's quota."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many threads of this process can run at once, at least 1.

    Args:
        cgroup: Where Linux mounts control groups (version 1 or 2); elsewhere there is none.
    """
    bound = getattr(os, "sched_getaffinity", None)
    cores = len(bound(0)) if bound else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Return the processor time that the container may use, in cores."""
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        else:
            names = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
            quota, period = ((cgroup / name).read_text(encoding="ascii") for name in names)
        return float(quota) / float(period) if float(quota) > 0 else float("inf")
    except (OSError, ValueError):  # no such limit: "max", -1, or no control groups
        return float("inf")
