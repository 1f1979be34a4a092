"""The model protocol, `CausalModel`: the interface between `decoding`, `models` and `backends`.

`tests/backends/conformance.py` checks implementations. Guided, compiled, captured and timed models
are a `ModelWrapper` around another model.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from diagd.decoding.sampling import Draw, ValidRanges, sample
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import Section
from diagd.decoding.visibility import NEVER, Rule, Seen, raster_rule


def check_ids(ids: Tensor, limit: int, name: str) -> None:
    """Raise ValueError unless ids are int64 and in range."""
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} ids must be in [0, {limit}), got {int(ids.min())}..{int(ids.max())}"
        )


class StepFunction(Protocol):
    def __call__(self, steps: Sequence[Tensor], num_slots: int, first: int = 0, /) -> None:
        """Run steps in order, each some lanes (see `Lanes`) of the same sequences.

        Args:
            steps: at most `steps_at_once` of the model.
            num_slots: cache slots that their lanes may see.
            first: the first of the sequences.
        """


@dataclass(eq=False)
class Buffers:
    """The memory of S sequences, allocated once and never moved."""

    tokens: Tensor  # (S, slots) int64; the last slot is scratch, which is never visible
    held: Tensor  # (S, slots) int64, the position in raster order in each slot, or -1
    fed_at: Tensor  # (S, slots) int64, the step at which each slot's true token is fed
    seeds: Tensor  # (S,) int64
    cache: Any  # the model's cache
    capture_seconds: float = 0.0  # seconds spent on capturing steps over it as CUDA graphs


@dataclass(frozen=True)
class Drawing:
    """How the tokens of neighbouring sequences are sampled.

    With scales, 1 + len(scales) sequences are one stream: logits of the last + scale * (those of
    the one before - its own), and so on to the first; they are sampled once, and written to all.
    """

    num_sequences: int
    sampling: SamplingOptions
    ranges: ValidRanges
    scales: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    """Constants of all steps of a batch."""

    buffers: Buffers
    drawings: tuple[Drawing, ...]  # of all sequences, in order
    rule: Rule = raster_rule  # which lane sees which token

    @property
    def is_plain(self) -> bool:  # supported by specialised kernels
        return self.rule is raster_rule and not any(one.scales for one in self.drawings)

    @property
    def kind(self) -> Hashable:
        """Everything that a step depends on except buffers, lanes and slots."""
        return self.drawings, self.rule


@dataclass(frozen=True)
class ModelShape:
    """Sizes and device of a model."""

    vocab_size: int  # columns of the logits
    num_embeddings: int  # ids that may be fed: [0, num_embeddings)
    max_positions: int  # maximum sequence length
    device: torch.device  # where the weights are
    # whether only distances between positions matter, so that positions may grow without bound
    relative_positions: bool = False
    on_grid: bool = False  # positions are rows and columns of frames and cannot be shifted
    stand_in: int | None = None  # the id learnt to stand in at row starts, if any


class CausalModel(Protocol):
    """A raster-order model that can be fed any tokens at any slots, in any order.

    Subclass it to inherit the defaults. Logits do not depend on the order of lanes, or, except for
    rounding, on what else is in a step or the batch.
    """

    # whether steps are compiled or captured: use few widths of a step, and let draws not depend on
    # state that earlier steps left outside of the buffers
    replays: bool = False
    # steps that a batch collects, until it reads memory, for one call of the step function
    steps_at_once: int = 1

    @property
    def shape(self) -> ModelShape: ...

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def num_embeddings(self) -> int:
        return self.shape.num_embeddings

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def relative_positions(self) -> bool:
        return self.shape.relative_positions

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    def embeddings(self) -> Tensor:
        """The embedding table used by steps, (num_embeddings, hidden size or more), writable."""
        raise ValueError("this backend does not support prompt embeddings: use another --backend")

    def check_prompt(self, prompt: Tensor, context_frames: int) -> None:
        """Raise ValueError for a prompt (B, P) of known ids that the model would misread."""

    @property
    def scales(self) -> tuple[float, ...]:
        """Classifier-free guidance scales, one for each unconditional prompt of a stream."""
        return ()

    def prompts_of(self, prompt: Tensor, row: int, batch_size: int) -> list[Tensor]:
        """Return the prompts of a batch row's sequences: its own (P,), and one for each scale."""
        return [prompt]

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        """Return the coordinates of positions (...), (3, ...) int64: frame, row and column.

        None: rotation uses the positions themselves. Called once, when lanes are laid out.

        Args:
            positions: int64, of one sequence.
            sections: its frames in order, all but the last complete; None: those of a plain pass.
        """
        return None

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate keys and values of sequences of `num_slots` slots, the last one scratch.

        Args:
            context: cross-attention input of all lanes, for models that have one.

        Returns:
            The cache of `forward`. If it has `keys`, a tensor for each layer, errors can name the
            layer in which NaN appeared.
        """
        ...

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        """Clear a cache in place; return whether it is as new (by default False)."""
        return False

    def make_buffers(self, batch_size: int, num_slots: int, context: Tensor | None) -> Buffers:
        """Allocate the memory of a batch, of at least `num_slots` slots, the last one scratch."""
        cache = self.make_cache(batch_size, num_slots, context)
        tokens = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=self.device)
        held, seeds = torch.full_like(tokens, -1), torch.zeros_like(tokens[:, 0])
        return Buffers(tokens, held, torch.full_like(held, NEVER), seeds, cache)

    def make_step(self, step: Step) -> StepFunction | None:
        """Return a function that runs steps; None uses `diagd.decoding.step.run_steps`."""
        return None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: Any,
        logits_to_keep: int = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        """Feed lanes: write their keys and values, then attend.

        Args:
            tokens: (S', L) int64, of the cache's sequences from `first` on.
            positions: (S', L) int64, positions of the lanes in raster order: below
                max_positions unless `relative_positions`. (L,) is the same for all sequences.
            slots: (S', L) or (L,) int64, the cache slots to write. Only scratch, which is never
                visible, may occur more than once: padded lanes write there, with any finite
                logits.
            seen: which lane sees which of the cache slots [0, M). Contents of hidden slots have
                no effect; a lane that sees nothing has any finite logits.
            cache: from `make_cache`, changed in place.
            logits_to_keep: 0 for all lanes, else the number of last lanes.
            coordinates: (3, S', L) int64, for models that have some; None: those of the
            positions.

        Returns:
            (S', L, vocab_size) logits.
        """
        ...

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        """Sample one token per lane, as `diagd.decoding.sampling.sample`; kernels must agree."""
        return sample(logits, draw)


Behind = TypeVar("Behind", bound=CausalModel)


class ModelWrapper(CausalModel, Generic[Behind]):
    """Forward every call to another model; subclasses override what they change.

    Steps of a subclass that overrides feeding or sampling run part by part; a subclass that
    overrides make_cache gets no reused caches.
    """

    def __init__(self, model: Behind) -> None:
        self.model, self.replays = model, self.replays or model.replays
        if not self._overrides("make_step", "forward", "sample"):
            self.steps_at_once = model.steps_at_once

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def embeddings(self) -> Tensor:
        return self.model.embeddings

    def check_prompt(self, prompt: Tensor, context_frames: int) -> None:
        self.model.check_prompt(prompt, context_frames)

    @property
    def scales(self) -> tuple[float, ...]:
        return self.model.scales

    def prompts_of(self, prompt: Tensor, row: int, batch_size: int) -> list[Tensor]:
        return self.model.prompts_of(prompt, row, batch_size)

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        return self.model.coordinates(positions, sections)

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        return self.model.make_cache(batch_size, num_slots, context)

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        return not self._overrides("make_cache") and self.model.renew_cache(cache, context)

    def make_buffers(self, batch_size: int, num_slots: int, context: Tensor | None) -> Buffers:
        if self._overrides("make_cache"):
            return super().make_buffers(batch_size, num_slots, context)
        return self.model.make_buffers(batch_size, num_slots, context)

    def make_step(self, step: Step) -> StepFunction | None:
        return None if self._overrides("forward", "sample") else self.model.make_step(step)

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(ModelWrapper, name) for name in names)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model.forward(*args, **kwargs)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        return self.model.sample(logits, draw)
