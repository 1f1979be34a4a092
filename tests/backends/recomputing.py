"""A backend from outside, and the protocol in plain words: without keys and values.

Its cache remembers every lane that was fed and whom it saw, and a step is the full forward over all
of them. A slot stands for the lane that was last written there.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from diagd.decoding.model import ModelWrapper
from diagd.decoding.visibility import Seen
from diagd.models.attention import check_sizes, refuse_context
from diagd.models.transformer import Transformer


class Recomputing(ModelWrapper[Transformer]):
    """It brings all of the protocol that matters itself."""

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> list[SimpleNamespace]:
        refuse_context(context)
        check_sizes(batch_size, num_slots)
        return [
            SimpleNamespace(
                tokens=torch.zeros(1, 0, dtype=torch.int64),
                positions=torch.zeros(0, dtype=torch.int64),
                coordinates=torch.zeros(3, 0, dtype=torch.int64),
                visible=torch.zeros(0, 0, dtype=torch.bool),
                lane_in=torch.full((num_slots,), -1),
            )
            for _ in range(batch_size)
        ]

    def renew_cache(self, cache: list[SimpleNamespace], context: Tensor | None = None) -> bool:
        return False

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: list[SimpleNamespace],
        logits_to_keep: int = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        count, lanes = tokens.shape
        positions, slots = positions.expand(count, lanes), slots.expand(count, lanes)
        mask = seen.mask().expand(count, -1, -1)
        turned = self.coordinates(positions) if coordinates is None else coordinates
        each = [None] * count if turned is None else turned.unbind(1)
        logits = [
            self._forward(*given, cache[first + row])
            for row, given in enumerate(zip(tokens, positions, slots, mask, each, strict=True))
        ]
        return torch.cat(logits)[:, -min(logits_to_keep or lanes, lanes) :]

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        coordinates: Tensor | None,
        cache: SimpleNamespace,
    ) -> Tensor:
        fed, lanes = cache.tokens.shape[1], len(tokens)
        cache.lane_in[slots] = fed + torch.arange(lanes)
        lane, slot = visible.nonzero(as_tuple=True)
        seen = cache.lane_in[slot]
        assert (seen >= 0).all(), "a lane sees a slot that nobody has written"
        cache.tokens = torch.cat([cache.tokens, tokens[None]], 1)
        cache.positions = torch.cat([cache.positions, positions])
        cache.visible = F.pad(cache.visible, (0, lanes, 0, lanes))
        cache.visible[fed + lane, seen] = True
        if coordinates is not None:
            cache.coordinates = torch.cat([cache.coordinates, coordinates], 1)
        told = None if coordinates is None else cache.coordinates
        seen = Seen.of_mask(cache.visible, cache.positions, cache.positions)
        given = cache.tokens, cache.positions
        return self.model(*given, seen=seen, coordinates=told, logits_to_keep=lanes)
