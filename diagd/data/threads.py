"""Threads that split work between them instead of every operation between all threads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool whose threads run each torch operation on one core.

    Operations on many threads wait for the slowest one at every layer; on cores shared with other
    programs that made a training step four times slower than independent workers.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # the workers also changed what later threads start with
