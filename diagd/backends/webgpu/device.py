"""The GPU by WebGPU (`wgpu`): its shaders, compiled when first used, and buffers that grow."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diagd.extras import require

WGPU = Any  # an object of the optional package `wgpu`, which is not typed here

UNIFORM = 256  # bytes from one step's record to the next, as every device can
# The two groups of buffers that all shaders see: one of a stream, one of a dispatch.
SHARED = {"tasks": "uniform", "lanes": "read-only-storage", "memory": "storage", "arena": "storage"}
OWN = {"matrix": "read-only-storage", "vector": "read-only-storage", "cache": "storage"}


class Device:
    """This machine's GPU, with as much memory as it gives; OSError where there is none."""

    def __init__(self) -> None:
        require("backend webgpu", "wgpu")
        gpu = importlib.import_module("wgpu").gpu
        try:
            adapter = gpu.request_adapter_sync(power_preference="high-performance")
        except RuntimeError as error:
            raise OSError(f"wgpu finds no GPU ({error})") from None
        sizes = ("max-buffer-size", "max-storage-buffer-binding-size")
        limits = {name: adapter.limits[name] for name in sizes}
        self.name: str = adapter.summary
        self.device: WGPU = adapter.request_device_sync(required_limits=limits)
        self.queue: WGPU = self.device.queue
        self._layouts = {len(kinds): self._layout(kinds) for kinds in (SHARED, OWN)}
        self._pipelines: dict[tuple[str, str], WGPU] = {}
        self._modules: dict[str, WGPU] = {}
        self._whole = self.device.create_pipeline_layout(
            bind_group_layouts=[self._layouts[len(SHARED)], self._layouts[len(OWN)]]
        )

    def _layout(self, kinds: dict[str, str]) -> WGPU:
        buffers = [{"type": k, "has_dynamic_offset": k == "uniform"} for k in kinds.values()]
        return self.device.create_bind_group_layout(
            entries=[
                {"binding": index, "visibility": "COMPUTE", "buffer": buffer}
                for index, buffer in enumerate(buffers)
            ]
        )

    def pipeline(self, code: str, entry: str) -> WGPU:
        """Return an entry point of a text, compiled now or before."""
        if code not in self._modules:
            self._modules[code] = self.device.create_shader_module(code=code)
        if (code, entry) not in self._pipelines:
            stage = {"module": self._modules[code], "entry_point": entry}
            made = self.device.create_compute_pipeline(layout=self._whole, compute=stage)
            self._pipelines[code, entry] = made
        return self._pipelines[code, entry]

    def bind(self, buffers: dict[str, WGPU]) -> WGPU:
        """Make a group of the buffers of `SHARED` or `OWN`."""
        sizes = [UNIFORM if name == "tasks" else one.size for name, one in buffers.items()]
        return self.device.create_bind_group(
            layout=self._layouts[len(buffers)],
            entries=[
                {"binding": index, "resource": {"buffer": buffer, "offset": 0, "size": size}}
                for index, (buffer, size) in enumerate(zip(buffers.values(), sizes, strict=True))
            ],
        )

    def make(self, size: int, kind: str = "STORAGE") -> WGPU:
        """Make a buffer of so many bytes, which are zero."""
        return self.device.create_buffer(size=size, usage=f"{kind}|COPY_SRC|COPY_DST")

    def upload(self, tensor: Tensor) -> WGPU:
        """Copy a tensor to a buffer of its own."""
        data, usage = bytes_of(tensor), "STORAGE|COPY_DST"
        return self.device.create_buffer_with_data(data=data, usage=usage)


@cache
def open_device() -> Device:
    return Device()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Workspace:
    """The buffers of a stream that all dispatches share, made anew where they are too small."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, WGPU] = {}
        self.group: WGPU = None

    def write(self, arena: int, **contents: bytes) -> None:
        """Send bytes to the other buffers, and have so many in the arena."""
        for name, kind in SHARED.items():
            size = arena if name == "arena" else len(contents[name])
            if name not in self._buffers or self._buffers[name].size < size:
                made = self._device.make(size, "UNIFORM" if kind == "uniform" else "STORAGE")
                self._buffers[name], self.group = made, None
        if self.group is None:
            self.group = self._device.bind(self._buffers)
        for name, data in contents.items():
            self._device.queue.write_buffer(self._buffers[name], 0, data)

    def read(self, name: str, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Wait for all that was submitted; return numbers of a buffer, (count,)."""
        size = dtype.itemsize
        data = self._device.queue.read_buffer(self._buffers[name], start * size, count * size)
        return torch.frombuffer(bytearray(data), dtype=dtype)
