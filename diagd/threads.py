"""The number of PyTorch's threads: the cores that other programs leave free.

Threads wait for each other at the end of every operation, and PyTorch's spin meanwhile. If another
program occupies one of two cores, two threads are slower than one. So step-by-step code calls
`follow_free_cores` before each step, which measures again once a second. A number set by the user
is kept: by OMP_NUM_THREADS, `--threads` or `torch.set_num_threads`.
"""

import os
import threading
import time

import psutil
import torch

from diagd.system import usable_cores

LOOK_S = 1.0
_CHOSEN_BY = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
_NOT_USED = "idle", "iowait", "guest", "guest_nice"  # guests are counted in user and nice


class Neighbours:
    """CPU use of other processes on the cores that this process may use."""

    def __init__(self) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores = sorted(affinity(0) if affinity else range(os.cpu_count() or 1))
        self._then = self._clocks()

    def share(self) -> float:
        """Return the share of these cores that others used since the last call."""
        then, self._then = self._then, self._clocks()
        seconds, used, own = (now - before for now, before in zip(self._then, then, strict=True))
        return min(max(0.0, used - own) / (max(seconds, 1e-3) * len(self.cores)), 1.0)

    def _clocks(self) -> tuple[float, float, float]:
        """Return the time, the busy seconds of these cores, and those of this process."""
        every = psutil.cpu_times(percpu=True)
        cores = [every[number] for number in self.cores if number < len(every)]
        used = sum(sum(core) - sum(getattr(core, n, 0) for n in _NOT_USED) for core in cores)
        return time.monotonic(), used, time.process_time()


class _Threads:
    """PyTorch's number of threads, which each computing thread has; new ones inherit the last."""

    def __init__(self) -> None:
        self.max_threads = self.number = torch.get_num_threads()
        self.neighbours, self.looked = Neighbours(), time.monotonic()
        # PyTorch's own defaults
        alone = len(self.neighbours.cores), os.cpu_count(), psutil.cpu_count(logical=False)
        self.is_chosen = self.max_threads not in alone or not os.environ.keys().isdisjoint(
            _CHOSEN_BY
        )
        self.process = os.getpid()  # PyTorch's threads do not survive a fork
        self.here = threading.local()

    def follow(self) -> None:
        """Set this thread's number of PyTorch threads to that of the free cores, at least one."""
        now, here = time.monotonic(), self.here
        if self.is_chosen or now < getattr(here, "due", 0.0):
            return
        here.due, found = now + LOOK_S, torch.get_num_threads()
        ours = (here.number,) if hasattr(here, "number") else (self.max_threads, self.number)
        if found not in ours or os.getpid() != self.process:
            here.due = float("inf")
            return
        if now - self.looked >= LOOK_S:  # otherwise another thread just measured
            free = len(self.neighbours.cores) * (1 - self.neighbours.share())
            self.number = min(self.max_threads, usable_cores(), max(1, int(free + 0.5)))
            self.looked = now
        if found != self.number:
            torch.set_num_threads(self.number)
        here.number = self.number

    def when_idle(self) -> int:
        """Return the number of PyTorch's threads on an otherwise idle machine."""
        found = torch.get_num_threads()
        return self.max_threads if not self.is_chosen and found == self.number else found

    def origin(self) -> str:
        """Return, in words, what set the number."""
        return "set by the user" if self.is_chosen else "one per free core"


_threads = _Threads()
follow_free_cores, threads_when_idle = _threads.follow, _threads.when_idle
threads_from = _threads.origin
