"""The model's thread: errors of work in it, and painting beside it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import torch

from diagd.backends.native.model import NativeModel
from diagd.decoding.model import CausalModel

Result = TypeVar("Result")


def tried(work: Callable[[], Result]) -> Result | Exception:
    """Return the result of work, or the exception that it raised."""
    try:
        return work()
    except Exception as error:
        return error


class Painter:
    """Paints beside the model, or in its thread where the model has none to spare."""

    def __init__(self, model: CausalModel, thread: Executor) -> None:
        self.of_model = self.thread = thread  # the owner shuts the threads down
        self.native = None
        if isinstance(model, NativeModel) and model.num_threads > 1:
            self.native, self.threads_left = model, model.num_threads - 1
            before = torch.get_num_threads()
            self.thread = ThreadPoolExecutor(1, "painter", torch.set_num_threads, (1,))
            self.thread.submit(torch.get_num_threads).result()
            torch.set_num_threads(before)  # or threads yet to come would have one, too

    def submit(self, paint: Callable[[], Result], is_idle: bool = False) -> asyncio.Future[Result]:
        """Paint; with all threads if the model is idle."""
        loop = asyncio.get_running_loop()
        if is_idle:
            return loop.run_in_executor(self.of_model, paint)
        return loop.run_in_executor(self.thread, self._run, paint)

    def _run(self, paint: Callable[[], Result]) -> Result:
        if self.native is None:
            return paint()
        before, self.native.max_threads = self.native.max_threads, self.threads_left
        try:
            return paint()
        finally:
            self.native.max_threads = before
