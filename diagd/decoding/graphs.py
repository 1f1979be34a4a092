"""Steps captured as CUDA graphs, and replayed: one launch for all the kernels of a step.

A graph works in the memory that it was captured over, so graphs belong to that memory (`Workspace`)
and live as long as it does. All are captured on one stream of the device, since cuBLAS keeps tens
of megabytes for each stream that it has seen, and share one pool for what lies between kernels.
"""

import time
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.compiling import compile_for_one_shape
from diagd.decoding.plan import Lanes

BLOCK = 512  # cache slots are read in whole blocks: a graph for each number of them
MOST_GRAPHS = 256  # kept over one memory; then those captured first leave
_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Captured(NamedTuple):
    """A graph, the lanes that it reads, and the compiled code whose kernels it launches."""

    graph: torch.cuda.CUDAGraph
    lanes: Tensor
    code: Any


class Graphs:
    """The graphs captured over one memory.

    Args:
        device: where it is.
        scratch: the slot that nobody sees.

    Attributes:
        seconds: how long captures took, compiling and warming up included.
    """

    def __init__(self, device: torch.device, scratch: int) -> None:
        self.device, self.scratch, self.seconds = device, scratch, 0.0
        self._captured: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._captured)

    def run(
        self,
        kind: Hashable,
        step: Callable[[Tensor, int], None],
        lanes: Tensor,
        num_slots: int,
        compiled: bool = False,
    ) -> None:
        """Replay a step, captured when a step of its kind and shape is run for the first time.

        Args:
            kind: all that the step depends on but the memory, the lanes and the slots.
            step: everything it touches besides the lanes stays where it is as long as this lives.
            lanes: (8, L) int64 (see `Lanes`).
            num_slots: cache slots to read; rounded up to whole blocks.
            compiled: let torch.compile fuse the step, a method, before it is captured.

        Raises:
            ValueError: the step cannot be compiled.
        """
        num_slots = -(-num_slots // BLOCK) * BLOCK
        key = kind, lanes.shape[1], num_slots
        if key not in self._captured:
            while len(self._captured) >= MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
            with torch.cuda.device(self.device):
                self._captured[key] = self._capture(step, lanes, num_slots, compiled)
        captured = self._captured[key]
        captured.lanes.copy_(lanes)
        captured.graph.replay()

    def _capture(
        self, step: Callable[[Tensor, int], None], lanes: Tensor, num_slots: int, compiled: bool
    ) -> Captured:
        """Warm up, with lanes that write to scratch only, and capture, which runs nothing.

        Warming up compiles. Only the code is kept, not the method: that holds what holds this.
        """
        torch.cuda.synchronize()
        started = time.perf_counter()
        code = None
        if compiled:
            assert isinstance(step, MethodType)
            code = compile_for_one_shape(step.__func__)
            step = MethodType(code, step.__self__)
        static_lanes, warming = lanes.clone(), lanes.clone()
        Lanes.of(warming).slots.fill_(self.scratch)
        Lanes.of(warming).outputs.fill_(self.scratch)
        if self.device not in _SIDE_STREAMS:
            _SIDE_STREAMS[self.device] = torch.cuda.Stream()
        side = _SIDE_STREAMS[self.device]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(warming, num_slots)
        torch.cuda.current_stream().wait_stream(side)
        # a pool is no more when the last graph in it is gone
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            step(static_lanes, num_slots)
        self.seconds += time.perf_counter() - started
        return Captured(graph, static_lanes, code)
