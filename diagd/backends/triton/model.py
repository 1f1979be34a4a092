"""Load the Triton kernels, and compare them with PyTorch's functions before they are used.

Triton compiles them on their first call, for the GPU in use.
"""

import importlib
import subprocess
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.model import ModelWrapper
from diagd.decoding.sampling import Draw, check_draws
from diagd.decoding.visibility import NEVER, Seen
from diagd.models.attention import attend
from diagd.models.config import ModelConfig
from diagd.models.rotary import rotate
from diagd.models.transformer import Transformer

MIN_CAPABILITY = (8, 0)  # compiled for in the tests, like 9.0 and 12.0
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LANES = (1, 5, 33)  # lanes of the steps tested: each tile size


class Kernels(NamedTuple):
    attend_slots: Callable[..., Tensor]  # `attention.attend_slots`
    store: Callable[..., Tensor]  # `attention.rotate_and_store`
    draw: Callable[..., Tensor]  # `sampling.draw`

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
        rule = seen.positions, seen.steps, seen.held, seen.fed_at, seen.window
        return self.attend_slots(queries, keys, values, *rule)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        options, ranges = draw.options, draw.ranges
        bounds = ranges.by_place, ranges.low, ranges.high
        where = draw.seeds, draw.frames, draw.rows, draw.columns
        kept = options.top_k or 0, 1.0 if options.top_p is None else options.top_p
        how = options.temperature, *kept, options.exclusive_top_p
        return self.draw(logits, *bounds, *where, *how)


def why_not_on(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device must be cuda, got {device}"
    if find_spec("triton") is None:
        return "Triton is not installed; torch's CUDA builds for Linux include it"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, given = (".".join(map(str, one)) for one in (MIN_CAPABILITY, capability))
        return f"GPU capability must be at least {needed}, got {given}"
    return None


def why_not(model: Transformer) -> str | None:
    if model.dtype not in DTYPES:
        return f"dtype must be float32, bfloat16 or float16, got {model.dtype}"
    if model.config.head_dim > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, got {model.config.head_dim}"
    return why_not_on(model.device)


@cache
def load_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels, tested on a device with heads of a model's size, or raise OSError."""
    triton = importlib.import_module("triton")
    attention = importlib.import_module("diagd.backends.triton.attention")
    sampling = importlib.import_module("diagd.backends.triton.sampling")
    kernels = Kernels(attention.attend_slots, attention.rotate_and_store, sampling.draw)
    like = torch.empty(0, dtype=dtype, device=device)
    try:
        _check_store(kernels, config, like)
        _check_attention(kernels, config, like)
        check_draws(kernels.sample, min(config.vocab_size, 5000), dtype, device)
    except ValueError as error:
        raise OSError(f"Triton kernels failed their test ({error})") from None
    except (triton.TritonError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f"Triton kernels do not run here ({reason})") from None
    return kernels


@torch.inference_mode()
def _check_attention(kernels: Kernels, config: ModelConfig, like: Tensor) -> None:
    """Attend in unordered slots, some unwritten, through views of larger buffers."""
    generator = torch.Generator().manual_seed(0)
    num_slots, kv_heads, size = 160, config.num_kv_heads, config.head_dim
    cached = torch.randn(2, 2, kv_heads, num_slots + 7, size, generator=generator)
    keys, values = cached.to(like)[:, :, :, :num_slots]
    held = torch.stack([torch.randperm(num_slots, generator=generator) for _ in range(2)]) - 9
    fed_at = torch.randint(-1, 9, (2, num_slots), generator=generator)
    fed_at[held < 0] = NEVER
    for lanes in LANES:
        queries = torch.randn(2, lanes, config.num_heads, size, generator=generator)
        queries = queries.to(like).transpose(1, 2)
        positions = torch.randint(0, num_slots - 9, (2, lanes), generator=generator)
        steps = torch.randint(0, 9, (2, lanes), generator=generator)
        rule = [one.to(like.device) for one in (positions, steps, held.clamp(min=-1), fed_at)]
        # visible to all, to many and to few
        seen = Seen(rule[0], rule[1], rule[2], rule[3], window=num_slots // lanes)
        expected = attend(queries.double(), keys.double(), values.double(), seen.mask())
        found = kernels.attend(queries, keys, values, seen)
        _check_close("attention differs by", found, expected, values)


@torch.inference_mode()
def _check_store(kernels: Kernels, config: ModelConfig, like: Tensor) -> None:
    """Store the parts of merged projections at unordered slots."""
    lanes, num_slots = 5, 9
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, lanes, sum(heads), config.head_dim, generator=generator)
    queries, keys, values = parts.to(like).transpose(1, 2).split(heads, 1)
    angles = torch.randn(2, lanes, config.head_dim // 2, generator=generator)
    turns = angles.cos().to(like), angles.sin().to(like)
    orders = [torch.randperm(num_slots, generator=generator)[:lanes] for _ in range(2)]
    slots = torch.stack(orders).to(like.device)
    buffers = values.new_zeros(2, 3, config.num_kv_heads, num_slots, config.head_dim)
    rotated = kernels.store(queries, keys, values, *turns, slots, *buffers, 1)
    wide = [turn.double() for turn in turns]
    expected = torch.zeros_like(buffers)
    for row in range(2):
        expected[0, 1 + row, :, slots[row]] = rotate(keys.double(), *wide)[row].to(like)
        expected[1, 1 + row, :, slots[row]] = values[row]
    _check_close("rotated keys differ by", rotated, rotate(queries.double(), *wide), parts)
    _check_close("rotated keys differ by", buffers, expected, parts)


def _check_close(what: str, found: Tensor, expected: Tensor, numbers: Tensor) -> None:
    error = (found - expected).abs().max().item()
    allowed = 8 * torch.finfo(found.dtype).eps * numbers.abs().max().item()
    if not error <= allowed:  # also for NaN
        raise ValueError(f"{what} {error:.2g}, allowed {allowed:.2g}")


class TritonModel(ModelWrapper[Transformer]):
    """A `Transformer` on CUDA with our kernels; OSError if they do not run there."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.kernels = load_kernels(model.config, model.dtype, model.device)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: Seen, *rest: Any, **named: Any
    ) -> Tensor:
        if seen.is_plain:
            attend, near = self.kernels.attend, seen.within(self.model.config.sliding_window)
            named["attends"] = partial(attend, seen=seen), partial(attend, seen=near)
            if not torch.compiler.is_compiling():  # compiled code fuses it there
                named["store"] = self.kernels.store
        return self.model.forward(tokens, positions, slots, seen, *rest, **named)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        return self.kernels.sample(logits, draw)
