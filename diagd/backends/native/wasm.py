"""A world as one file for the kernels that run in a browser (runs/web_kernels.py builds them).

The kernels use a world in place (csrc/wasm/world.cpp), so its file is an image of their memory:
records of csrc/wasm/records.h, with 32-bit pointers counted from the beginning, the data that they
point to, and at the end a list of the positions of all pointers.
"""

import ctypes
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diagd.backends.native.boundary import POINTER, Record, read_records
from diagd.backends.native.weights import MAX_DUOS, MAX_WEIGHT, NativeWeights
from diagd.decoding.sampling import ValidRanges
from diagd.decoding.schedule import Order, SequenceLayout, make_plan
from diagd.models.transformer import Transformer
from diagd.tokenizers.vq import VQTokenizer

MAGIC, VERSION = 0x64676961, 6
BLOCK = 16  # columns of a block of weights, for registers of 16 bytes
ALIGNED = 64  # bytes


class Offset(ctypes.c_uint32):
    """A pointer, counted from the beginning of the file; 0 is null."""


RECORDS = read_records(ctypes.Structure, Offset, "records.h", "wasm/records.h")
Layer, Model, Drawing, Prompt, Plan, Op, World = (
    RECORDS[name] for name in ("Layer", "Model", "Drawing", "Prompt", "Plan", "Op", "World")
)
CONVOLVE, SHORTCUT, ACTIVATE, ADD, ENLARGE = range(5)


class Memory:
    """The growing file, and the positions of its pointers."""

    def __init__(self, head: int) -> None:
        self.content = bytearray(head)
        self.pointers: list[int] = []

    def put(self, what: Tensor | Sequence[ctypes.Structure] | None) -> int:
        """Append numbers or records, and return their position; 0 for None."""
        if what is None:
            return 0
        self.content += bytes(-len(self.content) % ALIGNED)
        start = len(self.content)
        if isinstance(what, Tensor):
            self.content += what.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        else:
            for record in what:
                self.write(len(self.content), record)
        return start

    def write(self, at: int, record: ctypes.Structure) -> None:
        """Write a record over existing data or at the end, and remember its pointers."""
        self.content[at : at + ctypes.sizeof(record)] = bytes(record)
        self._remember(at, record)

    def finish(self, world: Any) -> bytes:
        """Return the file: the world's record at the beginning, the pointers at the end."""
        self.content += bytes(-len(self.content) % ALIGNED)
        world.size = len(self.content)
        self.write(0, world)
        content = self.content + struct.pack(f"<{len(self.pointers)}I", *self.pointers)
        world.checksum = zlib.crc32(content)
        content[: ctypes.sizeof(world)] = bytes(world)
        return bytes(content)

    def _remember(self, at: int, record: ctypes.Structure) -> None:
        for name, kind in record._fields_:  # type: ignore[misc]
            place = at + getattr(type(record), name).offset
            if kind is Offset and getattr(record, name).value:
                self.pointers.append(place)
            elif issubclass(kind, ctypes.Structure):
                self._remember(place, getattr(record, name))


class Play(NamedTuple):
    """Everything that a page can play: prompts, actions, strategies, and sampling options."""

    prompts: Sequence[tuple[Tensor, int]]  # (P,) int64 tokens, and number of frames at their end
    actions: Tensor  # (A, n) int64, the tokens of each action
    orders: Sequence[Order]  # of one frame
    max_slots: int  # maximum number of tokens that the model sees
    ranges: ValidRanges
    top_k: int
    exclusive_top_p: bool


def pack_world(model: Transformer, tokenizer: VQTokenizer, play: Play) -> bytes:
    """Format a world for the kernels, with weights quantized to 8 bits, or raise ValueError."""
    config = model.config
    if not model.relative_positions:
        raise ValueError("models with absolute positions are not supported in a browser")
    if play.ranges.row_ends is not None:
        raise ValueError("models with row separators are not supported in a browser")
    memory = Memory(ctypes.sizeof(World))
    weights = NativeWeights(model, "int8", BLOCK)
    ops = list(_ops(tokenizer.model, memory))
    per_frame = play.actions.shape[1] + config.tokens_per_frame

    def turns(length: int) -> Tensor | None:
        """Return the coordinates (n, 3) of `length` tokens and of the frame after them."""
        found = model.coordinates(torch.arange(length + per_frame))
        return None if found is None else found.T

    any_turns = turns(config.prefix_length + per_frame)
    world = World(
        magic=MAGIC,
        version=VERSION,
        prompts=len(play.prompts),
        actions=len(play.actions),
        strategies=len(play.orders),
        action_tokens=play.actions.shape[1],
        height=config.grid_height,
        width=config.grid_width,
        max_slots=play.max_slots,
        top_k=play.top_k,
        exclusive_top_p=play.exclusive_top_p,
        ops=len(ops),
        patch=tokenizer.patch_size,
        rounds_down=tokenizer.pixel_rounding == "down",
        drawing=Drawing(
            sequences=1,
            height=config.grid_height,
            width=config.grid_width,
            low=play.ranges.low,
            high=play.ranges.high,
            by_place=memory.put(play.ranges.by_place),
        ),
        model=_copy(weights, weights.record, memory),
        prompt=memory.put(
            [
                Prompt(len(tokens), frames, memory.put(tokens), memory.put(turns(len(tokens))))
                for tokens, frames in play.prompts
            ]
        ),
        further=memory.put(
            None if any_turns is None else any_turns[-1] - any_turns[-1 - per_frame]
        ),
        action=memory.put(play.actions),
        plan=memory.put([plan for order in play.orders for plan in _plans(order, play, memory)]),
        codebook=memory.put(_floats(tokenizer.codebook)),
        codes=tokenizer.codebook_size,
        channels=tokenizer.codebook.shape[1],
        op=memory.put(ops),
    )
    return memory.finish(world)


def places_of(packed: bytes) -> dict[str, int]:
    """Return the position of each matrix in a world, by the names of `webgpu.shader.weights_of`."""
    model = World.from_buffer_copy(packed).model  # type: ignore[attr-defined]
    layers = (Layer * model.num_layers).from_buffer_copy(packed, model.weights.value)
    found = {"embed": model.embeddings.value, "predict": model.head.value}
    names = {"project": "qkv", "attend": "out", "expand": "gate_up", "contract": "down"}
    for index, layer in enumerate(layers):
        found |= {f"{name} {index}": getattr(layer, names[name]).value for name in names}
    return found


def _copy(weights: NativeWeights, record: Record, memory: Memory) -> ctypes.Structure:
    copy = Model() if record is weights.record else Layer()
    for name, field in record._fields_:  # type: ignore[misc]
        found = record.memory.get(name)
        if isinstance(found, ctypes.Array):
            found = [_copy(weights, layer, memory) for layer in weights.layers]
        setattr(copy, name, memory.put(found) if field is POINTER else getattr(record, name))
    return copy


def _plans(order: Order, play: Play, memory: Memory) -> Iterator[ctypes.Structure]:
    for context_frames in (1, 2):  # stand-ins come from at most 2 frames back
        layout = SequenceLayout(order.grid, play.actions.shape[1], context_frames)
        plan = make_plan(order, layout, pad=False)
        lanes, fed_at = torch.tensor(plan.lanes), torch.tensor(plan.fed_at)
        starts, ends = (torch.tensor(one, dtype=torch.int32) for one in (plan.starts, plan.ends))
        yield Plan(order.num_steps, len(lanes), *map(memory.put, (lanes.T, starts, ends, fed_at)))


def _ops(model: Any, memory: Memory) -> Iterator[ctypes.Structure]:
    """List the operations of the decoder of a diffusers VQModel."""
    decoder = model.decoder

    def convolve(kind: int, layer: nn.Conv2d) -> ctypes.Structure:
        size, stride = layer.kernel_size[0], layer.stride[0]
        if layer.kernel_size != (size, size) or size not in (1, 3) or stride != 1:
            raise ValueError(f"tokenizer layer {layer} is not supported in a browser")
        if layer.in_channels > MAX_DUOS:
            raise ValueError(f"tokenizer must have at most {MAX_DUOS} channels in a browser")
        weight, scale = _round(layer.weight.flatten(2).permute(2, 1, 0))  # (place, in, out)
        bias = None if layer.bias is None else _floats(layer.bias)
        places = map(memory.put, (weight, bias, scale))
        return Op(kind, layer.in_channels, layer.out_channels, size, 0, *places)

    def activate(norm: Any) -> ctypes.Structure:
        if not isinstance(norm, nn.GroupNorm):
            raise ValueError("tokenizers with spatial norms are not supported in a browser")
        sizes, places = [norm.num_channels] * 2, map(_floats, (norm.weight, norm.bias))
        return Op(ACTIVATE, *sizes, norm.num_groups, norm.eps, *map(memory.put, places))

    def residual(block: Any) -> Iterator[ctypes.Structure]:
        shortcut = block.conv_shortcut
        yield Op(SHORTCUT) if shortcut is None else convolve(SHORTCUT, shortcut)
        yield activate(block.norm1)
        yield convolve(CONVOLVE, block.conv1)
        yield activate(block.norm2)
        yield convolve(CONVOLVE, block.conv2)
        yield Op(ADD)

    blocks = decoder.mid_block, *decoder.up_blocks
    if model.config.act_fn != "silu" or any(
        attention is not None for block in blocks for attention in getattr(block, "attentions", ())
    ):
        raise ValueError("tokenizers with attention or without silu are not supported in browsers")
    yield convolve(CONVOLVE, model.post_quant_conv)
    yield convolve(CONVOLVE, decoder.conv_in)
    for block in blocks:
        for resnet in block.resnets:
            yield from residual(resnet)
        for upsampler in getattr(block, "upsamplers", None) or ():
            yield Op(ENLARGE)
            yield convolve(CONVOLVE, upsampler.conv)
    yield activate(decoder.conv_norm_out)
    yield convolve(CONVOLVE, decoder.conv_out)


def _floats(values: Tensor) -> Tensor:
    return nn.functional.pad(values.detach().float(), (0, -values.shape[-1] % BLOCK))


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize (place, K, N) to int16 (place, N / BLOCK, K / 2, BLOCK, 2), a scale per column."""
    _, rows, columns = weight.shape
    padding = 0, -columns % BLOCK, 0, -rows % BLOCK
    weight = nn.functional.pad(weight.detach().float(), padding)
    scale = weight.abs().amax((0, 1)).clamp(min=1e-30) / MAX_WEIGHT
    whole = (weight / scale).round().to(torch.int16)
    return whole.unflatten(1, (-1, 2)).unflatten(3, (-1, BLOCK)).permute(0, 3, 1, 4, 2), scale
