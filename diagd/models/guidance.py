"""Classifier-free guidance: two prompts, one forward pass, one token for both.

logits = unconditional + scale * (conditional - unconditional)

Every batch row is run twice, side by side: once after the prompt that the engine feeds, once after
another one. Generated tokens are fed to both. To the engine the pair is one model.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diagd.decoding.model import CausalModel, ModelShape
from diagd.decoding.wrapper import ModelWrapper


class GuidedModel(ModelWrapper[CausalModel]):
    """A model steered away from what it would write after an unconditional prompt.

    The two prompts need not be of one length: the unconditional rows have slots ahead of the
    engine's for all but the last of their tokens, which is fed when the engine feeds its own last
    prompt token. Slots and positions of a lane are the same here, as in the engine. Only models
    that take positions for each row, `HuggingFaceModel`, can do so; for any other both prompts are
    one token, such as the class of an image: the two rows differ in nothing else.

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
        self.is_aligned = unconditional.shape[1] == prompt_length == 1
        if not (self.is_aligned or model.takes_rows):
            raise ValueError(
                "both prompts must be one token for a model that is no HuggingFaceModel, "
                f"got prompts of {prompt_length} and {unconditional.shape[1]}"
            )
        super().__init__(model)
        self.scale, self.prompt_length = scale, prompt_length
        self.unconditional = unconditional.to(model.device)
        self.num_ahead = unconditional.shape[1] - 1  # slots before the engine's
        self.shift = unconditional.shape[1] - prompt_length  # of the unconditional positions

    @property
    def shape(self) -> ModelShape:
        """The model's, but for the longest sequence, which both rows have to hold."""
        held = self.model.max_positions - max(0, self.shift)
        return replace(self.model.shape, max_positions=held)

    @torch.no_grad()
    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate a cache of pairs that holds the unconditional prompt but its last token."""
        given, ahead = len(self.unconditional), self.num_ahead
        if given not in (1, batch_size):
            raise ValueError(f"expected 1 or {batch_size} unconditional prompts, got {given}")
        cache = self.model.make_cache(2 * batch_size, ahead + num_slots, context)
        if ahead:
            rows = self.unconditional[:, :-1].expand(batch_size, -1).repeat(2, 1)
            slots = torch.arange(ahead, device=self.device)
            self.model.forward(rows, slots, slots, slots <= slots[:, None], cache, 1)
        return cache

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        return False  # the unconditional prompt is in it

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        cache: Any,
        logits_to_keep: int = 0,
    ) -> Tensor:
        # the unconditional rows run the prompt's lanes as well, but never see them again
        ahead, last = self.num_ahead, self.prompt_length - 1
        theirs = torch.where(positions == last, self.unconditional[:, -1:], tokens)
        if self.is_aligned:
            pair = torch.cat([tokens, theirs])
            logits = self.model.forward(pair, positions, slots, visible, cache, logits_to_keep)
            return self._steer(logits)
        shifted = (positions + self.shift).clamp(min=0)
        shared = torch.arange(visible.shape[1], device=visible.device) >= last
        pair_visible = torch.stack([visible, visible & shared])
        pair_visible = functional.pad(pair_visible, (ahead, 0), value=False)
        pair_visible[1, :, :ahead] = True
        logits = self.model.forward(
            torch.cat([tokens, theirs]),
            torch.stack([positions, shifted]).repeat_interleave(len(tokens), 0),
            slots + ahead,
            pair_visible.repeat_interleave(len(tokens), 0),
            cache,
            logits_to_keep,
        )
        return self._steer(logits)

    def _steer(self, logits: Tensor) -> Tensor:
        conditional, unconditional = logits.float().chunk(2)
        return unconditional + self.scale * (conditional - unconditional)
