"""Steps captured as CUDA graphs, and replayed: one launch for all the kernels of a step.

A graph works in the memory that it was captured over, so graphs belong to that memory (`Workspace`)
and live as long as it does. All are captured on one stream of the device, since cuBLAS keeps tens
of megabytes for each stream that it has seen, and share one pool for what lies between kernels.
"""

import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from diagd.decoding.plan import Lanes

BLOCK = 512  # cache slots are read in whole blocks: a graph for each number of them
MOST_GRAPHS = 256  # kept over one memory; then those captured first leave
_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Graphs:
    """The graphs captured over one memory.

    Args:
        device: where it is.
        scratch: the slot that nobody sees.

    Attributes:
        seconds: how long captures took, warming up included.
    """

    def __init__(self, device: torch.device, scratch: int) -> None:
        self.device, self.scratch, self.seconds = device, scratch, 0.0
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._captured)

    def run(
        self,
        kind: Hashable,
        step: Callable[[Tensor, int], None],
        lanes: Tensor,
        num_slots: int,
    ) -> None:
        """Replay a step, captured when a step of its kind and shape is run for the first time.

        Args:
            kind: all that the step depends on but the memory, the lanes and the slots.
            step: everything it touches besides the lanes stays where it is as long as this lives.
            lanes: (8, L) int64 (see `Lanes`).
            num_slots: cache slots to read; rounded up to whole blocks.
        """
        num_slots = -(-num_slots // BLOCK) * BLOCK
        key = kind, lanes.shape[1], num_slots
        if key not in self._captured:
            while len(self._captured) >= MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
            with torch.cuda.device(self.device):
                self._captured[key] = self._capture(step, lanes, num_slots)
        graph, static_lanes = self._captured[key]
        static_lanes.copy_(lanes)
        graph.replay()

    def _capture(
        self, step: Callable[[Tensor, int], None], lanes: Tensor, num_slots: int
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up, with lanes that write to scratch only, and capture, which runs nothing."""
        torch.cuda.synchronize()
        started = time.perf_counter()
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
        pool = next((graph.pool() for graph, _ in self._captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            step(static_lanes, num_slots)
        self.seconds += time.perf_counter() - started
        return graph, static_lanes
