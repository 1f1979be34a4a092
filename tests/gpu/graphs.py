"""Streams, events and graphs of the pretended GPU (`tests/gpu/machine.py`).

A capture records the kernels of one stream and runs nothing. A replay runs them again in the very
memory that they were recorded with: a number of the host that was baked in stays what it was, and
memory that nobody holds any more is an error. What was allocated during a capture belongs to the
graph's pool; it is poisoned after the capture and before every replay of a graph of that pool.
"""

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

POISON = 0x7F  # every byte: float32 and bfloat16 of 3.4e38, and ids that no table has
_POOLS = itertools.count(1)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, those of lists and dictionaries, too."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):  # a union would be made anew each time
            found += tensors_in(*value)
        elif isinstance(value, dict) and value:
            found += tensors_in(*value.values())
    return found


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)

    def wait_stream(self, other: "Stream") -> None:
        """Kernels run one after the other here."""
        assert isinstance(other, Stream)


class Event:
    """Stands in for `torch.cuda.Event`; its time may be read after a synchronisation."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.seconds, self.known_from = machine, 0.0, None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time, which the host does not know before it has waited."""
        self.machine.timed.add(stream or torch.cuda.current_stream())
        self.seconds, self.known_from = time.perf_counter(), self.machine.num_synchronized + 1

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds."""
        for event in (self, end):
            if event.known_from is None or event.known_from > self.machine.num_synchronized:
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.seconds - self.seconds) * 1000


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`.

    Attributes:
        kernels: what to run, and the memory that results go to.
        owned: the bytes of what was allocated during the capture, by address.
        given: addresses of what was there before.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.kernels: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.owned: dict[int, torch.Tensor] = {}
        self.given: set[int] = set()
        self.handle, self.is_poisoned = 0, False

    def pool(self) -> int:
        """Return the name of the pool that holds what was allocated during the capture."""
        return self.handle

    def replay(self) -> None:
        """Run the kernels again where they ran."""
        machine = self.machine
        assert machine.capture is None
        machine.num_replays += 1
        lost = [address for address in self.given if address not in machine.holders]
        if lost:
            raise RuntimeError(f"a graph reads or writes {len(lost)} tensors that are gone")
        with _disable_current_modes():
            for graph in machine.pools[self.handle]:
                graph.poison()
            self.is_poisoned = False
            for func, args, kwargs, results in self.kernels:
                news = tensors_in(func(*args, **kwargs))
                for old, new in zip(results, news, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def poison(self) -> None:
        """Spoil what was allocated during the capture."""
        if not self.is_poisoned:
            for memory in self.owned.values():
                memory.fill_(POISON)
        self.is_poisoned = True


class Capture:
    """A capture under way."""

    def __init__(self, graph: Graph, stream: Stream) -> None:
        self.graph, self.stream = graph, stream
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what it would change

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a kernel; return results of the right shape."""
        graph = self.graph
        given = tensors_in(args, kwargs)
        addresses = {t.untyped_storage().data_ptr(): t for t in given if t.numel()}
        foreign = {a: t for a, t in addresses.items() if a not in graph.owned}
        if func._schema.is_mutable:
            for address, tensor in foreign.items():
                if address not in self.before:
                    whole = _bytes_of(tensor)
                    self.before[address] = whole, whole.clone()
        out = func(*args, **kwargs)
        results = tensors_in(out)
        made = {t.untyped_storage().data_ptr(): t for t in results}
        fresh = {a: _bytes_of(t) for a, t in made.items() if a not in addresses}
        if func._schema.is_mutable or fresh:
            graph.kernels.append((func, args, kwargs, results))
            graph.given |= {a for a in foreign if a in graph.machine.holders}
            graph.owned |= fresh
        return out

    def end(self) -> None:
        """Undo what running the kernels did."""
        with _disable_current_modes():
            for whole, copy in self.before.values():
                whole.copy_(copy)
            self.graph.poison()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


@contextlib.contextmanager
def capture_of(
    machine: Any, graph: Graph, pool: int | None = None, stream: Stream | None = None, **_: Any
) -> Iterator[None]:
    """Stand in for `torch.cuda.graph`."""
    assert machine.capture is None, "one capture at a time"
    if pool is not None and not machine.pools[pool]:
        raise RuntimeError("INTERNAL ASSERT: the pool's graphs are all gone, so it is no more")
    machine.num_synchronized += 1
    graph.handle = next(_POOLS) if pool is None else pool
    stream = stream or Stream()
    machine.num_captures += 1
    with machine.on(stream):
        machine.capture = Capture(graph, stream)
        try:
            yield
        finally:
            machine.capture.end()
            machine.capture = None
    machine.pools.setdefault(graph.handle, weakref.WeakSet()).add(graph)
