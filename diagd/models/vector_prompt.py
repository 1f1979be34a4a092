"""A prompt of vectors: rows that are written into a model's table of embeddings.

So kernels, number types and guidance read them as they read ids.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.model import CausalModel, ModelShape, ModelWrapper


class VectorPrompt(ModelWrapper[CausalModel]):
    """A model that begins with vectors, the last of `num_places`; those before stay free.

    The vectors are written when a cache is made, which is to be prefilled before the next one.

    Args:
        ids: (P,) int64, under which the vectors are fed.
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

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        return self.model.see(positions + self.num_free, steps, held + self.num_free, fed_at)

    def forward(self, tokens: Tensor, positions: Tensor, *rest: Any, **named: Any) -> Tensor:
        return self.model.forward(tokens, positions + self.num_free, *rest, **named)
