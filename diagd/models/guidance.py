"""Prompts hidden from the engine: unconditional ones, and one of vectors."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.model import CausalModel, ModelShape, ModelWrapper, check_ids
from diagd.decoding.schedule import Section
from diagd.decoding.visibility import Seen


class GuidedModel(ModelWrapper[CausalModel]):
    """A model with classifier-free guidance.

    logits = unconditional + scale * (conditional - unconditional). Each prompt has its own sequence
    (see `Stream`), to which every sampled token is written. A picture and a text make three: with
    both, with the picture, with neither.

    Args:
        unconditional: (1, U) or (B, U) int64, or B of (U,), an empty or negative prompt with the
            model's own image start; it replaces the first `prompt_length` (at least 1) tokens of
            the engine's prompt. In a list of several, each is guided by the one before.
        prompt_length: one, or one for each row.
        scale: 1 is no guidance; one for each unconditional prompt.
    """

    def __init__(
        self,
        model: CausalModel,
        unconditional: Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]],
        prompt_length: int | Sequence[int],
        scale: float | Sequence[float],
    ) -> None:
        is_one = isinstance(unconditional, Tensor)
        others: list[Any] = [unconditional] if is_one else list(unconditional)
        if not is_one and others and isinstance(others[0], Tensor) and others[0].ndim == 1:
            others = [others]
        lengths = [prompt_length] if isinstance(prompt_length, int) else list(prompt_length)
        scales = tuple(scale) if isinstance(scale, Sequence) else (scale,)
        if (given := len(scales)) != len(others):
            raise ValueError(f"scale must be one for each of {len(others)} prompts, got {given}")
        for one in others:
            is_flat = isinstance(one, Tensor) and one.ndim != 2
            if is_flat or not len(one) or not all(row.numel() for row in one):
                shape = tuple(one.shape) if isinstance(one, Tensor) else "an empty one"
                expected = "of shape (1 or batch, at least 1)"
                raise ValueError(f"unconditional must be {expected}, got {shape}")
            for row in one:
                check_ids(row, model.num_embeddings, "unconditional")
        if min(lengths) < 1:
            raise ValueError(f"prompt_length must be at least 1, got {min(lengths)}")
        for row, length in enumerate(lengths):
            given = [len(one[min(row, len(one) - 1)]) for one in others]
            if model.shape.on_grid and set(given) != {length}:
                raise ValueError(
                    "prompts must be of one length for a model with positions on a grid, "
                    f"got prompts of {length} and {max(given, key=length.__ne__)}"
                )
        for one in scales:
            if not 0 <= one < math.inf:
                raise ValueError(f"scale must be a finite number of at least 0, got {one}")
        super().__init__(model)
        self.others, self.prompt_lengths, self._scales = others, lengths, scales

    @property
    def scales(self) -> tuple[float, ...]:
        return self._scales

    def prompts_of(self, prompt: Tensor, row: int, batch_size: int) -> list[Tensor]:
        if (given := len(self.prompt_lengths)) not in (1, batch_size):
            raise ValueError(f"prompt_length must be 1 or {batch_size} numbers, got {given}")
        length = self.prompt_lengths[min(row, len(self.prompt_lengths) - 1)]
        rest, prompts = prompt[length:], [prompt]
        for other in self.others:
            if len(other) not in (1, batch_size):
                expected = f"1 or {batch_size} unconditional prompts"
                raise ValueError(f"expected {expected}, got {len(other)}")
            prompts.append(torch.cat([other[min(row, len(other) - 1)].to(rest.device), rest]))
        return prompts


class VectorPrompt(ModelWrapper[CausalModel]):
    """A model with a prompt of vectors, the last of `num_places`; earlier places are unused.

    They are written to its embedding table, so kernels, number types and guidance read them like
    ids, when a cache is made, which must be prefilled before the next one is made.

    Args:
        ids: (P,) int64, ids under which the vectors are fed.
        vectors: (P, hidden_size).
    """

    def __init__(self, model: CausalModel, ids: Tensor, vectors: Tensor, num_places: int) -> None:
        super().__init__(model)
        self.ids, self.vectors, self.num_free = ids, vectors, num_places - len(vectors)

    @property
    def shape(self) -> ModelShape:
        return replace(self.model.shape, max_positions=self.model.max_positions - self.num_free)

    @torch.no_grad()
    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        table = self.model.embeddings
        table[self.ids, : self.vectors.shape[1]] = self.vectors.to(table)
        return self.model.make_cache(batch_size, num_slots, context)

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        moved = None if sections is None else [one.moved(self.num_free) for one in sections]
        return self.model.coordinates(positions + self.num_free, moved)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: Seen, *rest: Any, **named: Any
    ) -> Tensor:
        at, held = (places + self.num_free for places in (seen.positions, seen.held))
        seen = seen._replace(positions=at, held=held)
        return self.model.forward(tokens, positions + self.num_free, slots, seen, *rest, **named)
