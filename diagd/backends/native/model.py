"""Decode a Transformer with our own C++ kernels: one call per step, on CPUs (`csrc/decoder.cpp`).

With few lanes per step, PyTorch spends more time between kernels than in them (dev/LOG.md).
Outputs do not depend on the number of lanes in a step.
"""

import ctypes
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from diagd.backends.native.boundary import (
    POINTER,
    RECORDS,
    DrawingRecord,
    DrawRecord,
    Record,
    SpaceRecord,
    StepRecord,
    address,
    check_draw,
    check_end,
    check_ids,
    check_lanes,
    check_memory_of,
    check_records,
    check_step,
    check_step_end,
    coordinate_fields,
    rules_of,
    seen_fields,
)
from diagd.backends.native.library import load_library
from diagd.backends.native.weights import NativeDType, NativeWeights
from diagd.decoding.model import CausalModel, Drawing, ModelShape, Step, StepFunction
from diagd.decoding.sampling import Draw
from diagd.decoding.schedule import Section
from diagd.decoding.step import BLOCK, whole_blocks
from diagd.decoding.visibility import Seen
from diagd.models.attention import check_cache_fits, check_sizes
from diagd.models.rotary import grid_coordinates
from diagd.models.transformer import Transformer, shape_of
from diagd.system import usable_cores


class NativeCache:
    """Keys and values as blocked matrices, like weights (`csrc/kernels.h`), written by them."""

    def __init__(self, weights: NativeWeights, batch_size: int, num_slots: int) -> None:
        config, dtype = weights.config, weights.cache_dtype
        self.batch_size, self.num_slots = batch_size, num_slots
        self.kind = weights.cache_kind
        heads, slots = batch_size * config.num_kv_heads, whole_blocks(num_slots, weights.block)
        size = heads * slots * whole_blocks(config.head_dim, weights.block)
        if dtype == torch.int16:
            size += 2 * heads * slots  # a float32 scale for each slot
        check_cache_fits(2 * config.num_layers * size * dtype.itemsize, batch_size, num_slots)
        self.keys = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(size, dtype=dtype) for _ in range(config.num_layers)]
        layers = POINTER * config.num_layers
        self.fields = {  # of a StepRecord
            "num_slots": num_slots,
            "cached": batch_size,
            "keys": layers(*map(Tensor.data_ptr, self.keys)),
            "values": layers(*map(Tensor.data_ptr, self.values)),
        }


class NativeModel(CausalModel):
    """A `Transformer` behind the same protocol, on the CPU, with its weights copied and packed.

    Activations are float32. In int8, products are of integers, bit-identical on all processors:
    weights with a scale for each output, activations of 7 bits with a scale for each lane, or of 14
    if the model `has_outliers`, keys and values of 12 bits (`csrc/integers.h`).
    """

    def __init__(
        self,
        model: Transformer,
        weights: NativeDType = "float32",
        use_up: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """Pack the weights of a model, which `use_up` empties; OSError if kernels are missing."""
        self.config, self.weights = model.config, weights
        self._shape = shape_of(model.config, torch.device("cpu"))
        self._library = library or load_library()
        self._library.records.restype = ctypes.c_char_p
        check_records(self._library.records(), RECORDS)
        suffix = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}[weights]
        self._decode = getattr(self._library, f"decode_{suffix}")
        self._take = getattr(self._library, f"take_{suffix}")
        # (4,) float64 of a caller that times the kernels: every step adds the seconds of its linear
        # layers, its attention, the rest of the model and sampling
        self.seconds: Tensor | None = None
        self.max_threads = usable_cores()  # maximum per step, which otherwise uses PyTorch's number
        self._laid_out = NativeWeights(model, weights, self._library.block_columns(), use_up)
        self.weight_bytes = self._laid_out.weight_bytes  # per weight read in a step

    def __reduce__(self) -> NoReturn:  # also for copy.deepcopy
        raise TypeError("models of backend native cannot be copied or pickled: load them again")

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def embeddings(self) -> Tensor:
        return self._laid_out.record.memory["embeddings"]

    @property
    def num_threads(self) -> int:
        return min(torch.get_num_threads(), self.max_threads)

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        return grid_coordinates(self.config, positions, sections)

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> NativeCache:
        check_sizes(batch_size, num_slots, context)
        return NativeCache(self._laid_out, batch_size, num_slots)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: NativeCache,
        logits_to_keep: int = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        """Feed lanes in one call of the kernels; logits are float32 rows of a wider buffer.

        Raises ValueError for invalid arguments before memory is touched, MemoryError for too many
        lanes.
        """
        tokens, at, slots = check_step(tokens, positions, slots, seen)
        (sequences, lanes), told = tokens.shape, seen_fields(seen, tokens.shape)
        coordinates = self.coordinates(at) if coordinates is None else coordinates
        self._check_cache(cache, first, sequences)
        self._laid_out.check_room(sequences, lanes, cache.num_slots, self.num_threads)
        if told["visible_slots"] > cache.num_slots or logits_to_keep < 0:
            raise ValueError(
                f"seen must have at most {cache.num_slots} slots, got {told['visible_slots']}, and "
                f"logits_to_keep must be 0 or more, got {logits_to_keep}"
            )
        keep = min(logits_to_keep or lanes, lanes)
        logits = torch.empty(sequences, keep, whole_blocks(self.vocab_size, self._laid_out.block))
        step = StepRecord(
            sequences=sequences,
            lanes=lanes,
            first=first,
            keep=keep,
            threads=self.num_threads,
            tokens=tokens,
            at=at,
            slots=slots,
            logits=logits,
            seconds=self.seconds,
            **cache.fields,
            **told,
            **coordinate_fields(coordinates, tokens.shape),
        )
        check_step_end(self._decode(ctypes.byref(self._laid_out.record), ctypes.byref(step)), step)
        return logits[..., : self.vocab_size]

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        """Sample like `diagd.decoding.sampling.sample`, in one call (`csrc/sampler.cpp`)."""
        check_draw(logits, draw)
        sequences, lanes, vocab = logits.shape
        rows_of_floats = lanes * logits.stride(1), logits.stride(1), 1
        if logits.dtype != torch.float32 or logits.stride() != rows_of_floats:
            logits = logits.float().contiguous()  # logits of another model
        drawn = torch.empty(sequences, lanes, dtype=torch.int64)
        places = (one.expand(drawn.shape) for one in (draw.frames, draw.rows, draw.columns))
        frames, rows, columns = (one.contiguous() for one in places)
        low, high = draw.ranges.at(rows, columns).contiguous()
        record = DrawRecord(
            count=drawn.numel(),
            vocab=vocab,
            stride=logits.stride(1),
            threads=self.num_threads,
            logits=logits,
            low=low,
            high=high,
            seeds=draw.seeds[:, None].expand(drawn.shape).contiguous(),
            frames=frames,
            rows=rows,
            columns=columns,
            drawn=drawn,
            seconds=self.seconds,
            **rules_of(draw.options, vocab),
        )
        wrong = f"valid ids must be a non-empty range in [0, {vocab})"
        check_end(self._library.draw(ctypes.byref(record)), wrong, f"{drawn.numel()} draws")
        return drawn

    def make_step(self, step: Step) -> StepFunction | None:
        """Fuse a plain step into one call (`csrc/fused_step.cpp`), bit-identical."""
        if not step.is_plain:
            return None
        buffers, cache = step.buffers, step.buffers.cache
        check_memory_of(buffers)
        sequences, num_slots = buffers.tokens.shape
        self._check_cache(cache, 0, sequences)
        if num_slots != cache.num_slots:
            raise ValueError(f"cache must have {num_slots} slots, got {cache.num_slots}")
        drawings = [self._drawing(one) for one in step.drawings]
        covered = sum(one.num_sequences for one in step.drawings)
        if covered < sequences:
            raise ValueError(f"expected drawings of {sequences} sequences, got {covered}")
        fed = StepRecord(
            held_stride=num_slots, held=buffers.held, fed_at=buffers.fed_at, **cache.fields
        )
        space = SpaceRecord(
            tokens=buffers.tokens,
            seeds=buffers.seeds,
            drawings=(DrawingRecord * len(drawings))(*drawings),
        )
        num_fields = 11 if self.config.on_grid else 8
        records = [ctypes.byref(one) for one in (self._laid_out.record, fed, space)]

        def take(lanes: Tensor, max_slots: int, first: int) -> None:
            assert drawings  # kept alive with the step, like the buffers
            count, width = check_lanes(lanes, first, sequences, num_fields)
            read, threads = min(whole_blocks(max_slots, BLOCK), num_slots), self.num_threads
            fed.sequences, fed.lanes, fed.visible_slots, fed.first = count, width, read, first
            space.lanes = lanes.data_ptr()
            space.field_stride, space.sequence_stride, _ = lanes.stride()
            fed.seconds, fed.threads = address(self.seconds), threads
            self._laid_out.check_room(count, width, read, threads)
            check_step_end(self._take(*records), fed)

        def run(steps: Sequence[Tensor], max_slots: int, first: int = 0) -> None:
            for lanes in steps:
                take(lanes, max_slots, first)

        return run

    def _drawing(self, drawing: Drawing) -> Record:
        ranges, vocab = drawing.ranges, self.vocab_size
        check_ids(ranges, vocab)
        by_place = None if ranges.by_place is None else ranges.by_place.contiguous()
        height, width = (0, 0) if by_place is None else by_place.shape[:2]
        return DrawingRecord(
            rules=DrawRecord(vocab=vocab, **rules_of(drawing.sampling, vocab)),
            sequences=drawing.num_sequences,
            height=height,
            width=width,
            low=ranges.low,
            high=ranges.high,
            by_place=by_place,
        )

    def _check_cache(self, cache: NativeCache, first: int, count: int) -> None:
        if getattr(cache, "kind", None) != self._laid_out.cache_kind:
            raise ValueError("cache must be made by this model")
        if not 0 <= first <= first + count <= cache.batch_size:
            raise ValueError(f"cache has {cache.batch_size} sequences, got {count} from {first} on")
