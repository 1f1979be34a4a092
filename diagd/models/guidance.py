"""Prompts that the engine does not know of: those that guide, and one of vectors.

Classifier-free guidance: logits = unconditional + scale * (conditional - unconditional). Every
batch row is run once after each prompt, and generated tokens are fed to all. A prompt of a picture
and a text makes three: with both, with the picture alone, with neither.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diagd.decoding.generate_tokens import check_ids
from diagd.decoding.model import CausalModel, ModelShape, ModelWrapper
from diagd.decoding.visibility import visible_slots

# token ids (B, L) of one prompt's rows, their positions (L,), slots (L,) and mask (L, M)
Lanes = tuple[Tensor, Tensor, Tensor, Tensor]


class GuidedModel(ModelWrapper[CausalModel]):
    """A model steered away from what it would write after an unconditional prompt.

    Where the prompts are of one length, their rows differ in tokens alone. Otherwise the others
    have slots ahead of the engine's for all but the last of their tokens, which is fed when the
    engine feeds its own last prompt token; a model that takes no positions for each row is then run
    once for each prompt, with a cache for each.

    Args:
        unconditional: (1, U) or (B, U) int64, an empty or a negative prompt with the model's own
            image start; it replaces the first `prompt_length` (at least 1) tokens of the engine's
            prompt. Of several, each is steered away from by the one before it.
        scale: 1 is the model as it is; one for each unconditional prompt.
    """

    def __init__(
        self,
        model: CausalModel,
        unconditional: Tensor | Sequence[Tensor],
        prompt_length: int,
        scale: float | Sequence[float],
    ) -> None:
        others = [unconditional] if isinstance(unconditional, Tensor) else list(unconditional)
        self.scales = list(scale) if isinstance(scale, Sequence) else [scale]
        if (given := len(self.scales)) != len(others):
            raise ValueError(f"expected a scale for each of {len(others)} prompts, got {given}")
        for one in others:
            if one.ndim != 2 or not one.numel():
                expected = "of shape (1 or batch, at least 1)"
                raise ValueError(f"unconditional must be {expected}, got {tuple(one.shape)}")
            check_ids(one, model.num_embeddings, "unconditional")
        if prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        lengths = [one.shape[1] for one in others]
        if model.shape.on_grid and set(lengths) != {prompt_length}:
            raise ValueError(
                "both prompts must be of one length for a model with positions on a grid, "
                f"got prompts of {prompt_length} and {max(lengths, key=prompt_length.__ne__)}"
            )
        for one in self.scales:
            if not 0 <= one < math.inf:
                raise ValueError(f"scale must be a finite number of at least 0, got {one}")
        super().__init__(model)
        self.prompt_length = prompt_length
        self.others = [one.to(model.device) for one in others]
        self.shifts = [length - prompt_length for length in lengths]  # of the others' positions
        # of each prompt, the engine's first: slots before the engine's that it sees, and has
        self.seen = [0, *(length - 1 for length in lengths)] if any(self.shifts) else []
        longest = max(self.seen, default=0)
        self.ahead = [longest for _ in self.seen] if model.takes_rows else self.seen

    @property
    def shape(self) -> ModelShape:
        held = self.model.max_positions - max(0, *self.shifts)
        return replace(self.model.shape, max_positions=held)

    @torch.no_grad()
    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate a cache of all rows that holds the other prompts, where their lengths differ."""
        for count in map(len, self.others):
            if count not in (1, batch_size):
                raise ValueError(f"expected 1 or {batch_size} unconditional prompts, got {count}")
        make, prompts = self.model.make_cache, [self.others[-1][:, :0], *self.others]
        if not self.ahead or self.model.takes_rows:
            ahead = max(self.ahead, default=0)
            cache = make(len(prompts) * batch_size, ahead + num_slots, context)
        else:
            cache = [make(batch_size, ahead + num_slots, context) for ahead in self.ahead]
        if any(self.ahead):
            lanes: list[Lanes] = []
            for prompt, ahead, seen in zip(prompts, self.ahead, self.seen, strict=True):
                slots = torch.arange(ahead, device=self.device)
                own = slots >= ahead - seen  # the prompt ends there; nobody sees what is before
                visible = (slots <= slots[:, None]) & own | (slots == slots[:, None])
                fed = functional.pad(prompt[:, :-1].expand(batch_size, -1), (ahead - seen, 0))
                lanes.append((fed, (slots - ahead + seen).clamp(min=0), slots, visible))
            self._run(lanes, cache, 1)
        return cache

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        """Return the mask where rows see in different ways, else what the model makes it from."""
        see = visible_slots if self.ahead else self.model.see
        return see(positions, steps, held, fed_at)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Any,
        cache: Any,
        logits_to_keep: int = 0,
    ) -> Tensor:
        last, rows = self.prompt_length - 1, [(tokens, positions)]
        for other, shift in zip(self.others, self.shifts, strict=True):
            shifted = (positions + shift).clamp(min=0)
            own = other[:, shifted.clamp(max=other.shape[1] - 1)]
            rows.append((torch.where(positions <= last, own, tokens), shifted))
        if not self.ahead:
            whole = torch.cat([fed for fed, _ in rows])
            logits = self.model.forward(whole, positions, slots, visible, cache, logits_to_keep)
            return self._steer(logits)
        # the others' rows run the prompt's lanes as well, but never see them again
        shared = torch.arange(visible.shape[1], device=visible.device) >= last
        lanes: list[Lanes] = []
        each = zip(rows, self.ahead, self.seen, strict=True)
        for number, ((fed, at), ahead, seen) in enumerate(each):
            mask = visible & shared if number else visible
            mask = functional.pad(functional.pad(mask, (seen, 0), value=True), (ahead - seen, 0))
            lanes.append((fed, at, slots + ahead, mask))
        return self._steer(torch.cat(self._run(lanes, cache, logits_to_keep)))

    def _run(self, lanes: list[Lanes], cache: Any, logits_to_keep: int) -> list[Tensor]:
        """Return the logits of each prompt's lanes, or of all in one tensor."""
        run = self.model.forward
        if not self.model.takes_rows:
            pairs = zip(lanes, cache, strict=True)
            return [run(*each, own, logits_to_keep) for each, own in pairs if each[0].numel()]
        tokens, positions, slots, visible = zip(*lanes, strict=True)
        batch = len(tokens[0])
        positions, visible = (
            torch.stack(one).repeat_interleave(batch, 0) for one in (positions, visible)
        )
        return [run(torch.cat(tokens), positions, slots[0], visible, cache, logits_to_keep)]

    def _steer(self, logits: Tensor) -> Tensor:
        rows = logits.float().chunk(1 + len(self.others))
        steered = rows[-1]
        for scale, more, less in reversed(list(zip(self.scales, rows, rows[1:], strict=False))):
            steered = steered + scale * (more - less)
        return steered


class VectorPrompt(ModelWrapper[CausalModel]):
    """A model that begins with vectors, the last of `num_places`; those before stay free.

    They are written into its table of embeddings, so kernels, number types and guidance read them
    as they read ids, when a cache is made, which is to be prefilled before the next one.

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
