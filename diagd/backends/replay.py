"""Steps compiled by `torch.compile`, or captured as CUDA graphs and replayed.

Models generate the same tokens; their `forward` and `sample` must not wait or branch on data.

A graph is bound to the memory it was captured over, so graphs belong to those buffers, of which one
set outlives its stream: the model's next stream that fits reuses them, and replays from its first
step on. All graphs of a device are captured on one stream, as cuBLAS keeps tens of megabytes per
stream, and share one memory pool for intermediate results.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import Behind, Buffers, ModelWrapper, Step, StepFunction
from diagd.decoding.step import Lanes, run_step, run_steps, whole_blocks
from diagd.decoding.visibility import NEVER

COMPILED_BLOCK, CAPTURED_BLOCK = 256, 512  # cache slots are read in whole blocks: few shapes
NOT_COMPILED = "use a backend that does not compile, such as eager or cuda-graph"
MAX_GRAPHS = 256  # per memory; beyond, the oldest are dropped
STEPS_IN_GRAPH = 64  # a frame of 24 x 40 has that many at k=1; more do not pay
_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Compiled(ModelWrapper[Behind]):
    """A model whose steps are compiled once, for any number of lanes and slots."""

    replays = True

    def make_step(self, step: Step) -> StepFunction:
        take = compile_or_refuse(partial(run_step, self.model, step), NOT_COMPILED, dynamic=True)

        def run(steps: Sequence[Tensor], num_slots: int, first: int = 0) -> None:
            for lanes in steps:
                take(lanes, whole_blocks(num_slots, COMPILED_BLOCK), first)

        return run


class Captured(ModelWrapper[Behind]):
    """A model on CUDA with captured steps, if `compiled` after fusion by `torch.compile`."""

    replays, steps_at_once = True, STEPS_IN_GRAPH

    def __init__(self, model: Behind, compiled: bool = False) -> None:
        if model.device.type != "cuda":
            raise ValueError(f"backend cuda-graph needs --device cuda, got {model.device}")
        super().__init__(model)
        self.compiled = compiled
        if compiled:  # every graph would compile its own steps
            self.steps_at_once = 1
        self._graphs = weakref.WeakKeyDictionary[Buffers, Graphs]()
        self._waiting: tuple[Buffers, Graphs] | None = None

    def make_buffers(self, batch_size: int, num_slots: int, context: Tensor | None) -> Buffers:
        kept, self._waiting = self._waiting, None
        if kept is None or not self._renew(kept[0], batch_size, num_slots, context):
            kept = None  # freed before others are allocated: the memory may not hold both
            slots = whole_blocks(num_slots, CAPTURED_BLOCK)
            buffers = super().make_buffers(batch_size, slots, context)
            kept = buffers, Graphs(self.model.device, buffers.held.shape[1] - 1)
        lent = dataclasses.replace(kept[0])  # the memory is kept when the stream releases it
        self._graphs[lent] = kept[1]
        weakref.finalize(lent, _wait, weakref.ref(self), kept).atexit = False
        return lent

    def _renew(
        self, buffers: Buffers, batch_size: int, num_slots: int, context: Tensor | None
    ) -> bool:
        if len(buffers.tokens) != batch_size or buffers.held.shape[1] < num_slots:
            return False
        buffers.tokens.zero_()
        buffers.held.fill_(-1)
        buffers.fed_at.fill_(NEVER)
        return self.model.renew_cache(buffers.cache, context)

    def make_step(self, step: Step) -> StepFunction:
        graphs, kind = self._graphs[step.buffers], step.kind
        take = self.model.make_step(step) or partial(run_steps, self.model, step)

        def run(steps: Sequence[Tensor], num_slots: int, first: int = 0) -> None:
            given = kind, take, steps, num_slots, first, self.compiled
            step.buffers.capture_seconds += graphs.run(*given)

        return run


def _wait(model: "weakref.ref[Captured[Any]]", kept: "tuple[Buffers, Graphs]") -> None:
    if (alive := model()) is not None:
        alive._waiting = kept


class Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    lanes: Tensor  # of its steps, side by side
    code: Any  # compiled code whose kernels it launches


class Graphs:
    """The graphs captured over one memory, in which slot `scratch` is never visible."""

    def __init__(self, device: torch.device, scratch: int) -> None:
        self.device, self.scratch = device, scratch
        self._captured: dict[Hashable, Graph] = {}
        self._met: dict[Hashable, None] = {}  # several steps in a row, met once

    def run(
        self,
        kind: Hashable,
        take: StepFunction,
        steps: Sequence[Tensor],
        num_slots: int,
        first: int,
        compiled: bool,
    ) -> float:
        """Replay steps, as one graph if they follow each other for the second time.

        A graph is captured on the first run of its kind and shapes. All memory it uses except the
        lanes must stay in place; `compiled`, `take` is a `partial`.

        Returns:
            Seconds of captures.
        """
        given, parts = (kind, first, whole_blocks(num_slots, CAPTURED_BLOCK)), [steps]
        key = *given, *(lanes.shape for lanes in steps)
        if len(steps) > 1 and key not in self._captured and key not in self._met:
            _make_room(self._met)
            self._met[key], parts = None, [[one] for one in steps]
        return sum(self._replay(given, take, part, compiled) for part in parts)

    def _replay(
        self,
        given: tuple[Hashable, int, int],
        take: StepFunction,
        steps: Sequence[Tensor],
        compiled: bool,
    ) -> float:
        (_, first, num_slots), started, seconds = given, time.perf_counter(), 0.0
        key = *given, *(lanes.shape for lanes in steps)
        if key not in self._captured:
            _make_room(self._captured)
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                self._captured[key] = self._capture(take, steps, num_slots, first, compiled)
                seconds = time.perf_counter() - started
        captured = self._captured[key]
        torch.cat(list(steps), 2, out=captured.lanes)
        captured.graph.replay()
        return seconds

    def _capture(
        self,
        take: StepFunction,
        steps: Sequence[Tensor],
        num_slots: int,
        first: int,
        compiled: bool,
    ) -> Graph:
        """Warm up, with lanes that only write to scratch, and capture, which executes nothing."""
        code = None
        if compiled:  # the code is kept, not its arguments, which refer back to this object
            assert isinstance(take, partial)
            code = compile_for_one_shape(take.func)
            take = partial(code, *take.args)
        lanes, widths = torch.cat(list(steps), 2), [one.shape[2] for one in steps]
        warming = lanes.clone()
        Lanes.of(warming).slots.fill_(self.scratch)
        Lanes.of(warming).outputs.fill_(self.scratch)
        if self.device not in _SIDE_STREAMS:
            _SIDE_STREAMS[self.device] = torch.cuda.Stream()
        side = _SIDE_STREAMS[self.device]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            take(warming.split(widths, 2), num_slots, first)
        torch.cuda.current_stream().wait_stream(side)
        # a pool ends with its last graph
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            take(lanes.split(widths, 2), num_slots, first)
        return Graph(graph, lanes, code)


def _make_room(among: dict[Hashable, Any]) -> None:
    while len(among) >= MAX_GRAPHS:
        del among[next(iter(among))]


def compile_for_one_shape(function: FunctionType) -> Callable[..., None]:
    """Return an equivalent function, compiled on its first call, for one shape only.

    Compiled code lives as long as the code of its function, and a function's ninth shape is an
    error. So every shape gets its own function, and its code is freed with it.
    """
    bound = function.__name__, function.__defaults__, function.__closure__
    own = FunctionType(function.__code__.replace(), function.__globals__, *bound)
    options: dict[str, Any] = {"triton.cudagraphs": False}
    return compile_or_refuse(own, NOT_COMPILED, fullgraph=True, dynamic=False, options=options)


def compile_or_refuse(
    function: Callable[..., Any], advice: str, **options: Any
) -> Callable[..., Any]:
    """Compile a function on its first call; a failure is a ValueError that ends in advice."""
    compiled = torch.compile(function, **options)

    def run(*arguments: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # here, as it takes a second

        try:
            return compiled(*arguments)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # of any compiler backend
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            said = f"torch.compile cannot compile a step here ({reason}): {advice}"
            raise ValueError(said) from None

    return run
