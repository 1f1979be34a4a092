"""Decode a Transformer with our own C++ kernels: one call a step, for CPUs (`csrc/decoder.cpp`).

At a few lanes a step, PyTorch spends more time between kernels than in them (docs/log.md). Outputs
do not depend on how many lanes share a step.
"""

import ctypes
from typing import NoReturn

import torch
from torch import Tensor

from diagd.backends.native.boundary import (
    POINTER,
    DrawRecord,
    SpaceRecord,
    StepRecord,
    address,
    check_draw,
    check_end,
    check_lanes,
    check_records,
    check_space,
    check_step,
    check_step_end,
    rules_of,
)
from diagd.backends.native.library import load_library
from diagd.backends.native.weights import NativeDType, NativeWeights
from diagd.decoding.engine import BLOCK, whole_blocks
from diagd.decoding.model import CausalModel, ModelShape, Step, StepFunction
from diagd.decoding.sampling import Draw
from diagd.models.attention import SlotRule, check_cache_fits, check_sizes
from diagd.models.transformer import Transformer, shape_of
from diagd.system import usable_cores


class NativeCache:
    """Keys and values as matrices in blocks, like weights (`csrc/kernels.h`); written there."""

    def __init__(self, weights: NativeWeights, batch_size: int, num_slots: int) -> None:
        config, dtype = weights.config, weights.cache_dtype
        self.batch_size, self.num_slots = batch_size, num_slots
        self.kind = weights.cache_kind
        heads, slots = batch_size * config.num_kv_heads, whole_blocks(num_slots, weights.block)
        size = heads * slots * whole_blocks(config.head_dim, weights.block)
        if dtype == torch.int16:
            size += 2 * heads * slots  # a scale for each slot, as float32
        check_cache_fits(2 * config.num_layers * size * dtype.itemsize, batch_size, num_slots)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        layers = POINTER * config.num_layers
        self.fields = {  # of a StepRecord
            "num_slots": num_slots,
            "keys": layers(*map(Tensor.data_ptr, self.keys)),
            "values": layers(*map(Tensor.data_ptr, self.values)),
            "written": torch.zeros(num_slots, dtype=torch.int64),  # the position at each slot
        }


class NativeModel(CausalModel):
    """A `Transformer` behind the same protocol, on the CPU, its weights copied and packed.

    Activations are float32. With int8, products are of whole numbers, the same bits on every
    processor: weights with a scale for each output, activations of 7 bits with one for each lane,
    or of 14 where the model `has_outliers`, keys and values of 12 bits (`csrc/integers.h`).
    """

    def __init__(
        self,
        model: Transformer,
        weights: NativeDType = "float32",
        use_up: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """Pack the weights of a model, which `use_up` empties; OSError without kernels here."""
        self.config, self.weights = model.config, weights
        self._shape = shape_of(model.config, torch.device("cpu"))
        self._library = library or load_library()
        check_records(self._library)
        suffix = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}[weights]
        self._decode = getattr(self._library, f"decode_{suffix}")
        self._take = getattr(self._library, f"take_{suffix}")
        # (4,) float64 of whoever times the kernels: every step adds to it what its linear layers,
        # its attention, the rest of the model and drawing took
        self.seconds: Tensor | None = None
        self.max_threads = usable_cores()  # of a step, which uses as many as PyTorch otherwise
        self._laid_out = NativeWeights(model, weights, self._library.block_columns(), use_up)
        self.weight_bytes = self._laid_out.weight_bytes  # of a weight that a step reads

    def __reduce__(self) -> NoReturn:  # for copy.deepcopy as well
        raise TypeError("a model in native kernels is neither copied nor pickled: load it again")

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def embeddings(self) -> Tensor:
        return self._laid_out.record.memory["embeddings"]

    @property
    def num_threads(self) -> int:
        return min(torch.get_num_threads(), self.max_threads)

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> NativeCache:
        check_sizes(batch_size, num_slots, context)
        return NativeCache(self._laid_out, batch_size, num_slots)

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> SlotRule:
        return SlotRule(steps, held, fed_at)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | SlotRule,
        cache: NativeCache,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Feed lanes in one call of the kernels; the logits are float32 rows of a wider buffer.

        What does not fit is a ValueError before memory is touched, too many lanes a MemoryError.
        """
        check_step(tokens, positions, slots, visible)
        batch, lanes = tokens.shape
        self._check_cache(cache, batch)
        self._laid_out.check_room(batch, lanes, cache.num_slots, self.num_threads)
        if visible.shape[1] > cache.num_slots or logits_to_keep < 0:
            raise ValueError(
                f"visible must have at most {cache.num_slots} columns, got {visible.shape[1]}, and "
                f"logits_to_keep must be 0 or more, got {logits_to_keep}"
            )
        keep = min(logits_to_keep or lanes, lanes)
        logits = torch.empty(batch, keep, whole_blocks(self.vocab_size, self._laid_out.block))
        given = {"tokens": tokens, "at": positions, "slots": slots}
        given |= visible._asdict() if isinstance(visible, SlotRule) else {"visible": visible}
        step = StepRecord(
            batch=batch,
            lanes=lanes,
            visible_slots=visible.shape[1],
            keep=keep,
            threads=self.num_threads,
            logits=logits,
            seconds=self.seconds,
            **cache.fields,
            **{name: one.contiguous() for name, one in given.items()},
        )
        check_step_end(self._decode(ctypes.byref(self._laid_out.record), ctypes.byref(step)), step)
        return logits[..., : self.vocab_size]

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        """Draw as `diagd.decoding.sampling.sample` does, in one call (`csrc/sampler.cpp`)."""
        check_draw(logits, draw)
        batch, lanes, vocab = logits.shape
        rows_of_floats = lanes * logits.stride(1), logits.stride(1), 1
        if logits.dtype != torch.float32 or logits.stride() != rows_of_floats:
            logits = logits.float().contiguous()  # not our own
        bounds = draw.ranges.at(draw.rows, draw.columns).contiguous()
        drawn = torch.empty(batch, lanes, dtype=torch.int64)
        record = DrawRecord(
            batch=batch,
            lanes=lanes,
            vocab=vocab,
            stride=logits.stride(1),
            threads=self.num_threads,
            logits=logits,
            low=bounds[0],
            high=bounds[1],
            **{n: getattr(draw, n).contiguous() for n in ("seeds", "frames", "rows", "columns")},
            drawn=drawn,
            seconds=self.seconds,
            **rules_of(draw.options, vocab),
        )
        wrong = f"valid ids must be in [0, {vocab}) and not none at all"
        check_end(self._library.draw(ctypes.byref(record)), wrong, f"{batch * lanes} draws")
        return drawn

    def make_step(self, step: Step) -> StepFunction | None:
        """Fuse a plain step into one call (`csrc/fused_step.cpp`), to the same bits."""
        if not step.is_plain:
            return None
        buffers, ranges = step.buffers, step.ranges
        check_space(buffers, ranges, self.vocab_size)
        batch, num_slots = buffers.tokens.shape
        by_place = None if ranges.by_place is None else ranges.by_place.contiguous()
        cache: NativeCache = buffers.cache
        self._check_cache(cache, batch)
        rules = rules_of(step.sampling, self.vocab_size)
        fed = StepRecord(batch=batch, held=buffers.held, fed_at=buffers.fed_at, **cache.fields)
        draw = DrawRecord(batch=batch, vocab=self.vocab_size, seeds=buffers.seeds, **rules)
        space = SpaceRecord(
            slots=num_slots,
            height=0 if by_place is None else by_place.shape[0],
            width=0 if by_place is None else by_place.shape[1],
            low=ranges.low,
            high=ranges.high,
            by_place=by_place,
            tokens=buffers.tokens,
        )
        records = [ctypes.byref(one) for one in (self._laid_out.record, fed, draw, space)]

        def run(lanes: Tensor, max_slots: int) -> None:
            check_lanes(lanes, len(buffers.tokens))  # so they live as long as the step does
            read = min(whole_blocks(max_slots, BLOCK), num_slots)
            fed.lanes, fed.visible_slots = lanes.shape[1], read
            space.lanes, space.stride = lanes.data_ptr(), lanes.stride(0)
            fed.seconds = draw.seconds = address(self.seconds)
            fed.threads = self.num_threads
            self._laid_out.check_room(batch, fed.lanes, read, fed.threads)
            check_step_end(self._take(*records), fed)

        return run

    def _check_cache(self, cache: NativeCache, batch: int) -> None:
        if getattr(cache, "kind", None) != self._laid_out.cache_kind or cache.batch_size != batch:
            raise ValueError(f"cache must be made by this model for a batch of {batch}")
