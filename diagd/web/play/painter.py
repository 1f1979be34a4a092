"""The thread that makes pictures of tokens, beside the one that writes them.

Painting takes a seventh of a frame's time, and no less of it on two threads than on one. So it has
a thread of its own and paints a frame while the model writes the next. The native kernels leave a
thread to it meanwhile: two that share a core keep all the others waiting.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import torch

from diagd.backends.native.model import NativeModel
from diagd.decoding.runner import CausalModel

T = TypeVar("T")


class Painter:
    """Runs what paints: beside the model, or in its thread where that has none to spare.

    Args:
        thread: the model's.

    Attributes:
        thread: where it paints; to be shut down by who made the painter.
    """

    def __init__(self, model: CausalModel, thread: Executor) -> None:
        self.thread, self.native = thread, None
        if isinstance(model, NativeModel) and model.num_threads > 1:
            self.native, self.left = model, model.num_threads - 1
            before = torch.get_num_threads()
            self.thread = ThreadPoolExecutor(1, "painter", torch.set_num_threads, (1,))
            self.thread.submit(torch.get_num_threads).result()
            torch.set_num_threads(before)  # or threads yet to come would have one, too

    def submit(self, paint: Callable[[], T]) -> asyncio.Future[T]:
        """Paint, after all that was submitted before."""
        return asyncio.get_running_loop().run_in_executor(self.thread, self._run, paint)

    def _run(self, paint: Callable[[], T]) -> T:
        if self.native is None:
            return paint()
        most, self.native.max_threads = self.native.max_threads, self.left
        try:
            return paint()
        finally:
            self.native.max_threads = most
