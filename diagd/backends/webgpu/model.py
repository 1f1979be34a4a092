"""Decode a Transformer on any GPU by WebGPU: steps are recorded, and submitted once per frame.

The shaders (`decoder.wgsl`) need 4 * layers + 3 dispatches per step, with float32 activations.
Sampled
tokens stay on the device: `Buffers.tokens` fetches them when read.
"""

import importlib
from collections.abc import Iterator, Sequence
from ctypes import Structure
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.backends.native.boundary import rules_of
from diagd.backends.native.wasm import RECORDS
from diagd.backends.webgpu.shader import (
    OWN,
    SHARED,
    TILES,
    UNIFORM,
    bytes_of,
    check_shape,
    dispatches_of,
    row_floats,
    shader_of,
    weights_of,
)
from diagd.decoding.model import CausalModel, ModelShape, Step, StepFunction
from diagd.decoding.schedule import Section
from diagd.decoding.step import BLOCK, Lanes, whole_blocks
from diagd.decoding.visibility import Seen
from diagd.extras import require
from diagd.models.attention import check_cache_fits, check_sizes
from diagd.models.rotary import grid_coordinates
from diagd.models.transformer import Transformer, shape_of

FIELDS = 10  # fields of a lane before the cosines and sines of its position, as in the shader
WGPU = Any  # object of the optional package `wgpu`, which is not typed here


class Device:
    """This machine's GPU, with its maximum limits; OSError if there is none."""

    def __init__(self) -> None:
        require("backend webgpu", "wgpu")
        gpu = importlib.import_module("wgpu").gpu
        try:
            adapter = gpu.request_adapter_sync(power_preference="high-performance")
        except RuntimeError as error:
            raise OSError(f"no GPU found by wgpu ({error})") from None
        sizes = ("max-buffer-size", "max-storage-buffer-binding-size")
        limits = {name: adapter.limits[name] for name in sizes}
        self.device: WGPU = adapter.request_device_sync(required_limits=limits)
        self.queue: WGPU = self.device.queue
        self._layouts = {len(kinds): self._layout(kinds) for kinds in (SHARED, OWN)}
        layouts = [*self._layouts.values()]
        self._whole = self.device.create_pipeline_layout(bind_group_layouts=layouts)
        self._module = cache(lambda code: self.device.create_shader_module(code=code))
        self.pipeline = cache(self._pipeline)

    def _layout(self, kinds: dict[str, str]) -> WGPU:
        buffers = [{"type": k, "has_dynamic_offset": k == "uniform"} for k in kinds.values()]
        entries = [
            {"binding": n, "visibility": "COMPUTE", "buffer": b} for n, b in enumerate(buffers)
        ]
        return self.device.create_bind_group_layout(entries=entries)

    def _pipeline(self, code: str, entry: str) -> WGPU:
        stage = {"module": self._module(code), "entry_point": entry}
        return self.device.create_compute_pipeline(layout=self._whole, compute=stage)

    def bind(self, buffers: dict[str, WGPU]) -> WGPU:
        """Make a bind group of the buffers of `SHARED` or `OWN`."""
        entries: list[dict[str, Any]] = []
        for name, buffer in buffers.items():
            size = UNIFORM if name == "tasks" else buffer.size
            resource = {"buffer": buffer, "offset": 0, "size": size}
            entries.append({"binding": len(entries), "resource": resource})
        layout = self._layouts[len(buffers)]
        return self.device.create_bind_group(layout=layout, entries=entries)

    def make(self, size: int, kind: str = "STORAGE") -> WGPU:
        return self.device.create_buffer(size=size, usage=f"{kind}|COPY_SRC|COPY_DST")

    def upload(self, tensor: Tensor) -> WGPU:
        return self.device.create_buffer_with_data(data=bytes_of(tensor), usage="STORAGE|COPY_DST")


open_device = cache(Device)


Task = RECORDS["Task"]  # one step, in the shaders' format


class Batch(NamedTuple):
    """The steps of one submission, and the initial contents of its buffers."""

    tasks: list[Structure]
    lanes: Tensor  # int32: (lanes of all steps, 10 + head_dim), then a mask if there is one
    memory: Tensor  # int32: tokens, held, fed_at, seeds
    draws: bool

    @property
    def capacity(self) -> int:  # maximum rows of a step
        return max(task.rows for task in self.tasks)

    def records(self) -> bytes:
        """Return the tasks in the shaders' format, each `UNIFORM` bytes after the one before."""
        for task in self.tasks:
            task.capacity = self.capacity
        return b"".join(bytes(task).ljust(UNIFORM, b"\0") for task in self.tasks)


class WebGPUCache:
    """Keys and values on the device, and the buffers shared by a stream's dispatches.

    The latter are reallocated when they are too small.
    """

    def __init__(self, model: "WebGPUModel", num_slots: int) -> None:
        self.model, self.num_slots = model, num_slots
        config, self._device = model.config, model.device_used
        size = 8 * config.num_kv_heads * num_slots * config.head_dim
        check_cache_fits(config.num_layers * size, 1, num_slots)
        self.layers = [self._device.make(size) for _ in range(config.num_layers)]
        self.groups = {}  # by the names of weights
        for name, buffers in model.weights.items():
            layer = self.layers[int(name.partition(" ")[2] or 0)]
            self.groups[name] = self._device.bind(dict(zip(OWN, (*buffers, layer), strict=True)))
        self._shared: dict[str, WGPU] = {}
        self.shared_group: WGPU = None

    def write(self, arena: int, **contents: bytes) -> None:
        """Upload bytes to the shared buffers, and make room for `arena` numbers."""
        for name, kind in SHARED.items():
            size = arena if name == "arena" else len(contents[name])
            if name not in self._shared or self._shared[name].size < size:
                made = self._device.make(size, "UNIFORM" if kind == "uniform" else "STORAGE")
                self._shared[name], self.shared_group = made, None
        if self.shared_group is None:
            self.shared_group = self._device.bind(self._shared)
        for name, data in contents.items():
            self._device.queue.write_buffer(self._shared[name], 0, data)

    def read(self, name: str, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Wait for all submissions; return numbers of a shared buffer, (count,)."""
        size = dtype.itemsize
        data = self._device.queue.read_buffer(self._shared[name], start * size, count * size)
        return torch.frombuffer(bytearray(data), dtype=dtype)


class WebGPUModel(CausalModel):
    """A `Transformer` behind the same protocol, its weights copied to a GPU, optionally as int8.

    It decodes one sequence at a time. Tokens, masks and logits are on the CPU. Draws equal those of
    `sample` except for rounding.
    """

    steps_at_once = 1024  # a submission; frames of most models

    def __init__(self, model: Transformer, int8: bool = False) -> None:
        dtype = torch.int8 if int8 else model.dtype
        check_shape(model.config, dtype)
        self.config = model.config
        self._shape = shape_of(model.config, torch.device("cpu"))
        self.device_used = open_device()
        self.lane = FIELDS + model.config.head_dim
        self._rotary = model.model.rotary
        self.weights = {
            name: [self.device_used.upload(part) for part in weights]
            for name, weights in weights_of(model, dtype).items()
        }
        code = shader_of(self.config, dtype)
        self.codes = {rows: f"const ROWS = {rows}u;\n{code}" for rows in TILES}
        self.row_floats, self._dispatches = row_floats(self.config), dispatches_of(self.config)

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        return grid_coordinates(self.config, positions, sections)

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> WebGPUCache:
        check_sizes(batch_size, num_slots, context)
        if batch_size > 1:
            raise ValueError(
                f"backend webgpu decodes one sequence at a time, got {batch_size}: use another "
                "--backend for batches and guidance"
            )
        return WebGPUCache(self, num_slots)

    def make_step(self, step: Step) -> StepFunction | None:
        return partial(self._take, step) if step.is_plain else None

    def _take(self, step: Step, steps: Sequence[Tensor], num_slots: int, _first: int = 0) -> None:
        """Run steps in one submission, and fetch the tokens."""
        buffers, drawing = step.buffers, step.drawings[0]
        tokens, cache, slots = buffers.tokens, buffers.cache, buffers.tokens.shape[1]
        reach = min(whole_blocks(num_slots, BLOCK), slots)
        rules = rules_of(drawing.sampling, self.vocab_size)
        lanes = Lanes.of(torch.cat([lanes[:, 0] for lanes in steps], 1))
        # positions may exceed int32; only their order matters, except in a table
        base = int(buffers.held.max()) if self.relative_positions else 0
        fields = [lanes.positions - base, *lanes[1:8]]
        fields += drawing.ranges.at(lanes.rows, lanes.columns).unbind()
        held = (buffers.held[0] - base).clamp(min=-(2**31))
        seeds = torch.stack([buffers.seeds, buffers.seeds >> 32], 1)  # 32 bits each
        state = [tokens[0], held, buffers.fed_at[0], seeds[0]]
        tasks, start = [], 0
        for one in steps:
            tasks.append(self.task(one.shape[2], slots, slots, reach, first=start, **rules))
            start += one.shape[2] * self.lane
        memory = torch.cat([part.to(torch.int32) for part in state])
        told = self.lanes_of(fields, lanes.positions, lanes.coordinates)
        self.submit(cache, Batch(tasks, told, memory, True))
        tokens.copy_(cache.read("memory", torch.int32, 0, slots)[None])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: WebGPUCache,
        logits_to_keep: int = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        if len(tokens) != 1 or first:
            raise ValueError(f"expected one sequence, got {len(tokens)} from {first} on")
        lanes = tokens.shape[1]
        positions, slots = positions.expand(1, lanes)[0], slots.expand(1, lanes)[0]
        keep = min(logits_to_keep or lanes, lanes)
        last = 2**62 if self.relative_positions else self.max_positions
        limits = (tokens, self.num_embeddings), (slots, cache.num_slots), (positions, last)
        for numbers, limit in limits:
            if int(numbers.min()) < 0 or int(numbers.max()) >= limit:
                raise ValueError(f"tokens, slots or positions out of range [0, {limit})")
        zero = torch.zeros_like(slots)
        at = zero if self.relative_positions else positions
        fields = [at, slots, torch.arange(lanes), *[zero] * 7]
        task = self.task(lanes, cache.num_slots, lanes, seen.shape[1], top_p=1.0)
        task.keep, task.mask = keep, lanes * self.lane
        near = seen.within(self.config.sliding_window).mask()
        shown = (seen.mask().int() + near.int()).expand(1, -1, -1)
        turned = self.coordinates(positions) if coordinates is None else coordinates[:, 0]
        told = [self.lanes_of(fields, positions, turned), shown.int()]
        self.submit(
            cache,
            Batch(
                [task], torch.cat([one.flatten() for one in told]), tokens.flatten().int(), False
            ),
        )
        start = task.rows * (self.row_floats - self.vocab_size)
        logits = cache.read("arena", torch.float32, start, keep * self.vocab_size)
        return logits.view(1, keep, self.vocab_size)

    def task(self, lanes: int, slots: int, stride: int, reach: int, **rest: Any) -> Structure:
        return Task(lanes, lanes, lanes, reach, slots, stride, stride, **rest)

    def lanes_of(
        self, fields: list[Tensor], positions: Tensor, coordinates: Tensor | None
    ) -> Tensor:
        """Return (L, 10 + head_dim) int32: fields (L,) int64, and the rotation of a head."""
        if self._rotary is None:
            ones = torch.ones(len(positions), self.config.head_dim // 2)
            turns = torch.cat([ones, torch.zeros_like(ones)], -1)
        else:
            turns = torch.cat(self._rotary(positions, coordinates, torch.float32), -1)
        return torch.cat([torch.stack(fields, 1).int(), turns.view(torch.int32)], 1)

    def submit(self, cache: WebGPUCache, batch: Batch) -> None:
        device = self.device_used
        lanes, memory = bytes_of(batch.lanes), bytes_of(batch.memory)
        arena = 4 * batch.capacity * self.row_floats
        cache.write(arena, tasks=batch.records(), lanes=lanes, memory=memory)
        encoder = device.device.create_command_encoder()
        run = encoder.begin_compute_pass()
        for index, task in enumerate(batch.tasks):
            run.set_bind_group(0, cache.shared_group, [index * UNIFORM])
            code = self.codes[tile_of(task.rows)]
            for entry, weights, groups in self.dispatches(task, batch.draws):
                run.set_pipeline(device.pipeline(code, entry))
                run.set_bind_group(1, cache.groups[weights])
                run.dispatch_workgroups(*groups)
        run.end()
        device.queue.submit([encoder.finish()])

    def dispatches(self, task: Structure, draws: bool) -> Iterator[tuple[str, str, list[int]]]:
        tile, kept = tile_of(task.rows), task.rows // task.lanes * task.keep
        sizes = {"rows": task.rows, "tiles": -(-task.rows // tile), "kept": -(-kept // tile)}
        for entry, weights, groups in self._dispatches[: None if draws else -1]:
            yield entry, weights, [sizes[n] if isinstance(n, str) else n for n in groups]


def tile_of(rows: int) -> int:
    return next((tile for tile in TILES if rows <= tile), TILES[-1])
