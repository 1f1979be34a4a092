"""The protocol of a model, `CausalModel`: where `decoding` meets `models` and `backends`.

`tests/backends/conformance.py` checks that a class keeps to it. Models that are guided, compiled,
captured or timed are a `ModelWrapper` before another model.
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
    """Refuse what are no int64 ids, or foreign ones."""
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} ids must be in [0, {limit}), got {int(ids.min())}..{int(ids.max())}"
        )


class StepFunction(Protocol):
    def __call__(self, lanes: Tensor, num_slots: int, first: int = 0, /) -> None:
        """Run lanes (see `Lanes`) of the sequences from `first` on, over so many cache slots."""


@dataclass(eq=False)
class Buffers:
    """The memory of S sequences: it is allocated once, and nothing in it moves."""

    tokens: Tensor  # (S, slots) int64; the last slot is scratch, which nobody sees
    held: Tensor  # (S, slots) int64, the position in raster order that each slot holds, or -1
    fed_at: Tensor  # (S, slots) int64, the step at which each slot's true token is fed
    seeds: Tensor  # (S,) int64
    cache: Any  # what the model keeps
    capture_seconds: float = 0.0  # that went into capturing steps over it as CUDA graphs


@dataclass(frozen=True)
class Drawing:
    """How the tokens of neighbouring sequences are drawn.

    With scales, 1 + len(scales) sequences are a stream: logits of the last + scale * (those of one
    before it - its own), and so on to the first; they are drawn once, and written to all.
    """

    num_sequences: int
    sampling: SamplingOptions
    ranges: ValidRanges
    scales: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    """What every step of a batch shares."""

    buffers: Buffers
    drawings: tuple[Drawing, ...]  # of all sequences, in order
    rule: Rule = raster_rule  # who may see whom

    @property
    def is_plain(self) -> bool:  # for which kernels may be written
        return self.rule is raster_rule and not any(one.scales for one in self.drawings)

    @property
    def kind(self) -> Hashable:
        """All that a step depends on but the buffers, the lanes and the slots."""
        return self.drawings, self.rule


@dataclass(frozen=True)
class ModelShape:
    """Sizes and device of a model."""

    vocab_size: int  # columns of the logits
    num_embeddings: int  # ids that may be fed: [0, num_embeddings)
    max_positions: int  # the longest sequence it can hold
    device: torch.device  # where the weights are
    # whether only the distance between positions matters, so that they may grow for ever
    relative_positions: bool = False
    on_grid: bool = False  # positions stand for rows and columns of frames: they cannot be shifted


class CausalModel(Protocol):
    """A raster-order model that can be fed any tokens at any slots, in any order.

    Derive from it, and get the defaults. Logits do not depend on the order in which lanes stand,
    or, but for rounding, on who else shares a step or the batch.
    """

    # steps are compiled or captured: few widths of a step are better, and draws may not depend on
    # what earlier steps left outside of the buffers
    replays: bool = False

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
        """The table that steps read, (num_embeddings, hidden size or more), to be written to."""
        raise ValueError("this backend takes no text of vectors: choose another --backend")

    def check_prompt(self, prompt: Tensor, context_frames: int) -> None:
        """Refuse, with a ValueError, a prompt (B, P) of known ids that the model would misread."""

    @property
    def scales(self) -> tuple[float, ...]:
        """Of classifier-free guidance: one for each prompt that streams are steered away from."""
        return ()

    def prompts_of(self, prompt: Tensor, row: int, batch_size: int) -> list[Tensor]:
        """Return the prompts of the sequences of a batch row: its own (P,), and of each scale."""
        return [prompt]

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        """Return what positions (...) turn by, (3, ...) int64: frame, row and column.

        None: by the positions themselves. It is asked once, where lanes are laid out.

        Args:
            positions: int64, of one sequence.
            sections: its frames, in order, all but the last whole; None: as a plain pass has them.
        """
        return None

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate keys and values of sequences of `num_slots` slots, the last of them scratch.

        Args:
            context: cross-attention input of all lanes, for models that have one.

        Returns:
            whatever `forward` takes. Where it has `keys`, a tensor for each layer, errors can say
            in which layer numbers broke.
        """
        ...

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        """Empty a cache where it stands; return whether it is as new, which by default none is."""
        return False

    def make_buffers(self, batch_size: int, num_slots: int, context: Tensor | None) -> Buffers:
        """Allocate the memory of a batch; of `num_slots` slots or more, the last one scratch."""
        cache = self.make_cache(batch_size, num_slots, context)
        tokens = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=self.device)
        held, seeds = torch.full_like(tokens, -1), torch.zeros_like(tokens[:, 0])
        return Buffers(tokens, held, torch.full_like(held, NEVER), seeds, cache)

    def make_step(self, step: Step) -> StepFunction | None:
        """Return what runs steps; None leaves it to `diagd.decoding.step.run_step`."""
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
            tokens: (S', L) int64, of the sequences of the cache from `first` on.
            positions: (S', L) int64, where the lanes stand in raster order: below max_positions,
                unless `relative_positions`. Of (L,), all sequences stand there.
            slots: (S', L) or (L,) int64, the cache slots to write. Only scratch, which nobody sees,
                may be named more than once: padded lanes write there, with any finite logits.
            seen: who of them sees which of the cache slots [0, M). What hidden slots hold changes
                nothing; a lane that sees none has any finite logits.
            cache: from `make_cache`, changed in place.
            logits_to_keep: 0 for all lanes, else only the last so many.
            coordinates: (3, S', L) int64, told to models that have some; None: their own ones of
                these positions.

        Returns:
            (S', L, vocab_size) logits.
        """
        ...

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        """Draw one token a lane, as `diagd.decoding.sampling.sample`; kernels draw the same."""
        return sample(logits, draw)


Behind = TypeVar("Behind", bound=CausalModel)


class ModelWrapper(CausalModel, Generic[Behind]):
    """A model that stands before another one, and is it in all that a subclass does not say itself.

    A subclass that feeds or draws in a way of its own has its steps run part by part, and one that
    makes caches of its own gets none that were used.
    """

    def __init__(self, model: Behind) -> None:
        self.model, self.replays = model, self.replays or model.replays

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
