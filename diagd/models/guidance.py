"""Classifier-free guidance: two prompts, one forward pass, one token for both.

logits = unconditional + scale * (conditional - unconditional)

Every batch row is run twice, side by side: once after the prompt that the engine feeds, once after
another one. Generated tokens are fed to both. To the engine the pair is one model.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diagd.decoding.model import CausalModel, ModelShape, ModelWrapper


class GuidedModel(ModelWrapper[CausalModel]):
    """A model steered away from what it would write after an unconditional prompt.

    Where the two prompts are of one length, the two rows differ in tokens alone. Otherwise the
    unconditional rows have slots ahead of the engine's for all but the last of their tokens, which
    is fed when the engine feeds its own last prompt token; a model that takes no positions for each
    row is then run twice, with two caches. Slots and positions of a lane are the same here, as in
    the engine.

    Args:
        unconditional: (1, U) or (B, U) int64, an empty or a negative prompt with the model's own
            image start; it replaces the first `prompt_length` tokens of the engine's prompt, the
            text before the context frames. Both rows see what comes after.
        prompt_length: at least 1.
        scale: 1 is the model as it is; a larger one follows the prompt more closely.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self, model: CausalModel, unconditional: Tensor, prompt_length: int, scale: float
    ) -> None:
        if unconditional.ndim != 2 or not unconditional.numel():
            raise ValueError(
                "unconditional must be of shape (1 or batch, at least 1), "
                f"got {tuple(unconditional.shape)}"
            )
        if unconditional.dtype != torch.int64 or not (
            0 <= int(unconditional.min()) <= int(unconditional.max()) < model.num_embeddings
        ):
            raise ValueError(
                f"unconditional must be int64 ids in [0, {model.num_embeddings}), "
                f"got {unconditional.dtype} {unconditional.min()}..{unconditional.max()}"
            )
        if prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        length = unconditional.shape[1]
        if model.shape.on_grid and length != prompt_length:
            raise ValueError(
                "both prompts must be of one length for a model with positions on a grid, "
                f"got prompts of {prompt_length} and {length}"
            )
        super().__init__(model)
        self.scale, self.prompt_length = scale, prompt_length
        self.unconditional = unconditional.to(model.device)
        self.shift = length - prompt_length  # of the unconditional positions
        self.num_ahead = length - 1 if self.shift else 0  # slots before the engine's

    @property
    def shape(self) -> ModelShape:
        """The model's, but for the longest sequence, which both rows have to hold."""
        held = self.model.max_positions - max(0, self.shift)
        return replace(self.model.shape, max_positions=held)

    @torch.no_grad()
    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate a cache of pairs that holds an unconditional prompt of another length.

        Its last token is left out. A model that is run twice has two caches.
        """
        given, ahead = len(self.unconditional), self.num_ahead
        if given not in (1, batch_size):
            raise ValueError(f"expected 1 or {batch_size} unconditional prompts, got {given}")
        rows = self.unconditional[:, :-1].expand(batch_size, -1)
        if not self.shift or self.model.takes_rows:
            cache = theirs = self.model.make_cache(2 * batch_size, ahead + num_slots, context)
            rows = rows.repeat(2, 1)
        else:
            theirs = self.model.make_cache(batch_size, ahead + num_slots, context)
            cache = self.model.make_cache(batch_size, num_slots, context), theirs
        if ahead:
            slots = torch.arange(ahead, device=self.device)
            self.model.forward(rows, slots, slots, slots <= slots[:, None], theirs, 1)
        return cache

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        return False  # the unconditional prompt is in it

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        """Return the mask where rows see in two ways, else what the model makes it from."""
        see = partial(CausalModel.see, self) if self.shift else self.model.see
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
        run, last, ahead = self.model.forward, self.prompt_length - 1, self.num_ahead
        shifted = (positions + self.shift).clamp(min=0)
        own = self.unconditional[:, shifted.clamp(max=self.unconditional.shape[1] - 1)]
        theirs = torch.where(positions <= last, own, tokens)
        if not self.shift:
            pair = torch.cat([tokens, theirs])
            return self._steer(run(pair, positions, slots, visible, cache, logits_to_keep))
        # the unconditional rows run the prompt's lanes as well, but never see them again
        shared = torch.arange(visible.shape[1], device=visible.device) >= last
        theirs_visible = functional.pad(visible & shared, (ahead, 0), value=True)
        if not self.model.takes_rows:
            given, other = cache
            logits = (
                run(tokens, positions, slots, visible, given, logits_to_keep),
                run(theirs, shifted, slots + ahead, theirs_visible, other, logits_to_keep),
            )
            return self._steer(torch.cat(logits))
        visible = functional.pad(visible, (ahead, 0), value=False)
        logits = run(
            torch.cat([tokens, theirs]),
            torch.stack([positions, shifted]).repeat_interleave(len(tokens), 0),
            slots + ahead,
            torch.stack([visible, theirs_visible]).repeat_interleave(len(tokens), 0),
            cache,
            logits_to_keep,
        )
        return self._steer(logits)

    def _steer(self, logits: Tensor) -> Tensor:
        conditional, unconditional = logits.float().chunk(2)
        return unconditional + self.scale * (conditional - unconditional)
