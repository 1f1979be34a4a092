"""A machine with two GPUs for tests, pretended: tensors say `cuda:0` and compute on the CPU.

Within `pretended_gpus()`, `device="cuda"` works as on a machine that has one, and results are real.
The rules are those of CUDA: operands are on one device; whatever makes the host wait is counted,
and is an error while a graph is captured; captured graphs are the kernels of one stream with the
very memory they were given (see `tests/gpu/graphs.py`). Where memory stands is known as long as a
tensor holds it, so a leak is a number. Not pretended: time, rounding, kernels running side by side.
"""

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diagd
from tests.gpu.graphs import Capture, Event, Graph, Stream, capture_of, tensors_in
from tests.gpu.guard import NUM_DEVICES, exchange_device

PACKAGE = str(diagd.__path__[0])
# what gives the host a value or a shape that the data decides
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"),
}
COPYING = {"_to_copy", "to", "copy_", "copy", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class GpuTensor(torch.Tensor):
    """A tensor on a pretended device; `numbers` is what it holds, on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device) -> "GpuTensor":
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        out.numbers = numbers
        return out

    def __init__(self, numbers: torch.Tensor, device: torch.device) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.numbers}, device={self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert Machine.here is not None, f"{func} after the pretended machine was switched off"
        return Machine.here.launch(func, args, kwargs or {})


class Machine(TorchDispatchMode):
    """Two pretended GPUs.

    Attributes:
        waits: how often the host waited for a device, by reason and place.
        num_kernels: calls that were not mere views.
        num_captures, num_replays: of graphs.
        capture: the one under way.
        streams: of each device, the current one.
        used_streams, timed: those that ever had a kernel, or an event.
        holders: tensors that hold each piece of memory, by address; `sizes` in bytes.
    """

    here: "Machine | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.num_kernels = self.num_captures = self.num_replays = self.num_synchronized = 0
        self.capture: Capture | None = None
        self.streams = [Stream(index) for index in range(NUM_DEVICES)]
        self.used_streams: set[Stream] = set()
        self.timed: set[Stream] = set()
        self.pools: dict[int, weakref.WeakSet[Graph]] = {}
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Look away while torch.compile traces, and see the kernels of what it made."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Call this mode as it is: torch would look up each time that it must not be compiled."""
        return False

    @property
    def live_bytes(self) -> int:
        """Memory that some tensor holds."""
        return sum(self.sizes[address] for address in self.holders)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, args, kwargs = _with_device_by_name(func, args, kwargs or {})
        if GpuTensor not in types and not str(kwargs.get("device")).startswith("cuda"):
            return func(*args, **kwargs)
        return self.launch(func, args, kwargs)

    def wait(self, what: str) -> None:
        """Let the host wait for a device; an error while a graph is captured."""
        what = f"{what} at {_place()}"
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits[what] += 1

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation on the device where its tensors are, or where it is asked to."""
        name, args, kwargs = _with_device_by_name(func, args, kwargs)
        tensors = tensors_in(args, kwargs)
        mine = [t for t in tensors if isinstance(t, GpuTensor)]
        target = _resolved(kwargs.get("device")) or (mine[0].device if mine else None)
        if name == "copy_":
            target = args[0].device
        assert target is not None
        self._check(name, args, tensors, mine, target)
        plain_args, plain_kwargs = self._unwrap(args), self._unwrap(kwargs)
        if plain_kwargs.get("device") is not None:
            plain_kwargs = {**plain_kwargs, "device": torch.device("cpu")}
        on_gpu = target.type == "cuda"
        if on_gpu:
            self.used_streams.add(self.streams[target.index])
        capture = self.capture
        if capture is None or not on_gpu or capture.stream is not self.streams[target.index]:
            out = func(*plain_args, **plain_kwargs)
        else:
            out = capture.record(func, plain_args, plain_kwargs)
        if name in COPYING and out is plain_args[0] and args[0].device != target:
            out = out.clone()  # another device is another memory
        self.num_kernels += not func.is_view
        return self._wrap(out, mine, target) if on_gpu else out

    def _check(
        self,
        name: str,
        args: Any,
        tensors: list[torch.Tensor],
        mine: list[GpuTensor],
        target: torch.device,
    ) -> None:
        foreign = [t for t in tensors if t.device != target and (t.dim() or t.device.type != "cpu")]
        if name in COPYING:
            if any(t.device != target for t in tensors if t.dim() or t is not args[-1]):
                self.wait(f"copy to {target}")
        elif name in WAITING:
            self.wait(name)
        elif name in INDEXING:
            indices = [i for i in args[1] if isinstance(i, torch.Tensor)]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.wait(f"{name} by a mask")
            if any(i.device.type == "cpu" for i in indices):
                self.wait(f"{name} by indices of the host")
            foreign = [t for t in foreign if all(t is not i for i in indices)]
        if foreign and mine and name not in COPYING:
            devices = sorted({str(t.device) for t in (*foreign, *mine)})
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {', '.join(devices)}: "
                f"{name} at {_place()}"
            )

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, GpuTensor):
            return value.numbers
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._unwrap, value))
        if isinstance(value, dict):
            return {name: self._unwrap(one) for name, one in value.items()}
        if self.capture is not None and isinstance(value, torch.Tensor) and not value.dim():
            return value.clone()  # a number of the host is read once, when the kernel is launched
        return value

    def _wrap(self, value: Any, mine: list[GpuTensor], device: torch.device) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._wrap(one, mine, device) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        for tensor in mine:
            if tensor.numbers is value:
                return tensor
        with torch.inference_mode(False):  # of the shell only: views of it need a version counter
            tensor = GpuTensor(value, device)
        storage = value.untyped_storage()
        address = storage.data_ptr()
        self.holders[address] += 1
        self.sizes[address] = storage.nbytes()
        weakref.finalize(tensor, self._let_go, address).atexit = False
        return tensor

    def _let_go(self, address: int) -> None:
        self.holders[address] -= 1
        if not self.holders[address]:
            del self.holders[address]

    def synchronize(self, *_: Any) -> None:
        """Stand in for `torch.cuda.synchronize`."""
        self.wait("synchronize")
        self.num_synchronized += 1

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Stand in for `torch.cuda.stream`, which makes the stream's device current as well."""
        before = self.streams[stream.index]
        self.streams[stream.index] = stream
        device = exchange_device()(stream.index)
        try:
            yield
        finally:
            exchange_device()(device)
            self.streams[stream.index] = before


@functools.cache
def _arguments_of(func: Any) -> tuple[str, list[str], int | None]:
    """Return an operation's name, its arguments', and the place of its `device`."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("device") if "device" in names else None
    return func._schema.name.split("::")[1], names, place


def _with_device_by_name(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
    """Return the operation's name, and name all arguments from `device` on, if given by place."""
    name, names, place = _arguments_of(func)
    if place is None:
        return name, args, kwargs
    rest = zip(names[place:], args[place:], strict=False)
    return name, args[:place], {**dict(rest), **kwargs}


def _resolved(device: Any) -> torch.device | None:
    """Return the device with its number, which by default is that of the current one."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", exchange_device()(-1))
    return device


def _place() -> str:
    """Return the line of diagd that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


@contextlib.contextmanager
def pretended_gpus() -> Iterator[Machine]:
    """Switch the machine on."""
    machine, exchange = Machine(), exchange_device()

    def current_stream(device: Any = None) -> Stream:
        resolved = _resolved("cuda" if device is None else device)
        assert resolved is not None
        return machine.streams[resolved.index]

    patches = {
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: exchange(index),  # ctypes' own has no hash
        "_maybe_exchange_device": lambda index: exchange(index),
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: exchange_device()(-1),
        "get_device_name": lambda *_: "a pretended GPU",
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (2**33, 2**34),
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0),
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda *_: torch.zeros(1),  # torch.compile keeps it
        "set_rng_state": lambda *_: None,
        "synchronize": machine.synchronize,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: machine.live_bytes,
        "Stream": Stream,
        "current_stream": current_stream,
        "stream": machine.on,
        "Event": lambda **_: Event(machine),
        "CUDAGraph": lambda *_: Graph(machine),
        "graph": lambda *args, **kwargs: capture_of(machine, *args, **kwargs),
    }
    old = {name: getattr(torch.cuda, name) for name in patches}
    lifts = torch._C._only_lift_cpu_tensors()
    swaps = torch.__future__.get_overwrite_module_params_on_conversion()
    try:
        for name, value in patches.items():
            setattr(torch.cuda, name, value)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) asks the mode
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        Machine.here = machine
        with machine:
            yield machine
    finally:
        Machine.here = None
        exchange_device()(0)
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.__future__.set_overwrite_module_params_on_conversion(swaps)
        for name, value in old.items():
            setattr(torch.cuda, name, value)
