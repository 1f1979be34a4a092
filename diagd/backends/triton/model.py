"""Run a model's steps by our Triton kernels, which are compared with PyTorch's before their use.

Triton compiles them on their first call, for the GPU in use.
"""

import copy
import importlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from diagd.backends.linears import merge_linears, round_linears
from diagd.decoding.model import ModelWrapper, Step, StepFunction
from diagd.decoding.sampling import Draw, check_draws
from diagd.decoding.step import BLOCK, Lanes, draw, whole_blocks
from diagd.decoding.visibility import NEVER, Seen, raster_rule
from diagd.models.attention import StaticKVCache, keep_lanes
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

MIN_CAPABILITY = (8, 0)  # compiled for in the tests, like 9.0 and 12.0
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_LANES = 512  # of a step; prompts in larger pieces are PyTorch's, which are faster there
LANES = (1, 5, 33)  # lanes of the steps tested: several tile sizes
CHECKED_IDS = 1000  # of the vocabulary


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
    if model.config.visual_mlp_layers:
        return "visual_mlp_layers: our kernels run one MLP a layer"
    return why_not_on(model.device)


@cache
def check_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, int8: bool = False
) -> None:
    """Compare steps of a layer with those of PyTorch on a device; OSError if they differ."""
    triton = importlib.import_module("triton")
    try:
        with torch.no_grad():
            _check_steps(config, dtype, device, int8)
        check_draws(make_sampler(), min(config.vocab_size, 5000), dtype, device)
    except ValueError as error:
        raise OSError(f"Triton kernels failed their test ({error})") from None
    except (triton.TritonError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(f"Triton kernels do not run here ({reason})") from None


def _check_steps(config: ModelConfig, dtype: torch.dtype, device: torch.device, int8: bool) -> None:
    """Run steps in unordered slots, some unwritten, in float64 and by both kinds of kernels."""
    ids = min(config.vocab_size, CHECKED_IDS)
    slides = {"sliding_layers": (0,)} if config.sliding_layers else {}
    small = {"vocab_size": ids, "image_vocab_size": min(config.image_vocab_size, ids)}
    one = replace(config, num_layers=1, extra_embeddings=0, **small, **slides)
    plain = Transformer.random(one, dtype=dtype).to(device).requires_grad_(False)
    exact = copy.deepcopy(plain)
    exact = round_linears(exact, torch.float64) if int8 else exact.double()
    merged = merge_linears(plain, pack=False)
    merged = round_linears(merged, dtype) if int8 else merged
    models = exact, merged, TritonModel(merged)
    for lanes in LANES:
        expected, theirs, ours = (_one_step(model, lanes) for model in models)
        scale = float(expected.abs().amax())
        allowed = 4 * float((theirs - expected).abs().amax()) + 1e-5 * scale
        error = float((ours - expected).abs().amax())
        if not error <= allowed:  # also for NaN
            raise ValueError(f"a step differs by {error:.2g} of {scale:.2g}, allowed {allowed:.2g}")


def _one_step(model: "Transformer | TritonModel", lanes: int) -> Tensor:
    """Feed a step of two sequences that differ; return logits and cache, flat, in float64."""
    config, generator = model.config, torch.Generator().manual_seed(lanes)
    num_slots = min(160, config.max_positions)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(model.device)

    context = None
    if config.context_size:
        context = torch.randn(1, 3, config.context_size, generator=generator)
    cache = model.make_cache(3, num_slots + 7, context)
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    orders = [torch.randperm(num_slots, generator=generator) for _ in range(2)]
    held, fed_at = torch.stack(orders).to(model.device), whole(-1, 9, 2, num_slots)
    unwritten = whole(0, 5, 2, num_slots) == 0
    held[unwritten], fed_at[unwritten] = -1, NEVER
    positions, steps = whole(0, num_slots, 2, lanes), whole(0, 9, 2, lanes)
    slots = torch.stack(
        [order[torch.randperm(num_slots, generator=generator)[:lanes]] for order in orders]
    )
    seen = Seen(positions, steps, held, fed_at)
    given = (
        whole(0, config.vocab_size, 2, lanes),
        positions,
        slots.to(model.device),
        seen,
        cache,
        0,
        1,
    )
    logits = model.forward(*given)
    return torch.cat([part.flatten().double() for part in (logits, *cache.keys, *cache.values)])


def make_sampler() -> Callable[[Tensor, Draw], Tensor]:
    draw = importlib.import_module("diagd.backends.triton.sampling").draw

    def sample(logits: Tensor, how: Draw) -> Tensor:
        options, ranges = how.options, how.ranges
        bounds = ranges.by_place, ranges.low, ranges.high
        where = how.seeds, how.frames, how.rows, how.columns
        kept = options.top_k or 0, 1.0 if options.top_p is None else options.top_p
        return draw(logits, *bounds, *where, options.temperature, *kept, options.exclusive_top_p)

    return sample


class TritonModel(ModelWrapper[Transformer]):
    """A `Transformer` on CUDA with our kernels, its linear layers merged (see `merge_linears`).

    Args:
        dependent: start kernels before those before them have ended; None: where the device can.
    """

    def __init__(self, model: Transformer, dependent: bool | None = None) -> None:
        super().__init__(model)
        layers = importlib.import_module("diagd.backends.triton.layers")
        self.layers, self._sample = layers.Layers(model, dependent), make_sampler()

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def make_step(self, step: Step) -> StepFunction | None:
        """Make a step that looks ids up itself, without launches of their own."""
        if step.rule is not raster_rule:
            return None
        return partial(self._take, step)

    def _take(self, step: Step, steps: Sequence[Tensor], num_slots: int, first: int = 0) -> None:
        for lanes in steps:
            self._take_one(step, lanes, num_slots, first)

    def _take_one(self, step: Step, lanes: Tensor, num_slots: int, first: int) -> None:
        lane, memory, reach = Lanes.of(lanes), step.buffers, whole_blocks(num_slots, BLOCK)
        own = slice(first, first + lanes.shape[1])
        tokens, held, fed_at = memory.tokens[own], memory.held[own], memory.fed_at[own]
        seen = Seen(lane.positions, lane.steps, held[:, :reach], fed_at[:, :reach])
        given = lane.positions, lane.slots, seen, memory.cache, first, lane.coordinates
        hidden = self.layers.run(tokens, lane.inputs, *given)
        logits = self.layers.logits(hidden).view(*lanes.shape[1:], -1)
        tokens.scatter_(1, lane.outputs, draw(self, step, lane, logits, first))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: StaticKVCache,
        logits_to_keep: int = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        shape, rest = tokens.shape, (cache, logits_to_keep, first, coordinates)
        if not seen.is_plain or tokens.numel() > MAX_LANES:
            return self.model.forward(tokens, positions, slots, seen, *rest)
        positions, slots = positions.expand(shape), slots.expand(shape)
        if coordinates is None:
            coordinates = self.coordinates(positions)
        inputs = torch.arange(shape[1], device=tokens.device).expand(shape)
        given = positions, slots, seen, cache, first, coordinates
        hidden = self.layers.run(tokens, inputs, *given)
        kept = keep_lanes(hidden.view(*shape, -1), logits_to_keep).contiguous()
        return self.layers.logits(kept.flatten(0, 1)).view(*kept.shape[:2], -1)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        return self._sample(logits, draw)
