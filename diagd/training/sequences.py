"""Sequences of tokens and actions, cut from clips at positions drawn with a seed; or images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from diagd.tokenizers.shards import TokenClips


def generator_of(*key: int) -> torch.Generator:
    """Return a generator for a key, using all of it: torch uses the low 32 bits of a seed."""
    (seed,) = np.random.SeedSequence(key).generate_state(1)
    return torch.Generator().manual_seed(int(seed))


def sequences(clips: TokenClips, indices: Tensor, times: Tensor) -> Tensor:
    """Interleave frames of clips with the actions between them: frame, action, frame ...

    The frames of each clip (B,) at times (B, T) make a row (B, T * (height * width + n) - n), with
    n tokens of an action, whose ids follow the visual ids. A frame that repeats the previous one
    has the action "none".
    """
    visual = clips.tokens[indices[:, None], times].flatten(2).long()
    actions = clips.ids_of_actions(indices[:, None], times)
    held = times.diff(dim=1, prepend=times[:, :1] - 1) == 0
    if held.any():
        actions[held] = clips.codebook_size + torch.tensor(clips.codec.tokens_of("none"))
    return torch.cat([actions, visual], dim=2).flatten(1)[:, clips.codec.num_tokens :]


@dataclass(frozen=True)
class TokenImages:
    """Images as tokens behind prompts, each with its text (or class) and without."""

    tokens: Tensor  # (num_images, height * width) int16 or int32
    prompts: Sequence[Tensor]  # (P,) int64 each: all ids before the image
    unconditional: Sequence[Tensor]  # the same without what the image shows, as guidance needs
    drop: float  # share of the sequences that are drawn without
    codebook: str  # fingerprint of the tokenizer
    row_ends: bool  # whether the last token of each row is a known separator

    @cached_property
    def lengths(self) -> Tensor:
        """(2 * num_images,) int64, of prompts with and then without a text."""
        return torch.tensor([len(prompt) for prompt in (*self.prompts, *self.unconditional)])

    @property
    def length(self) -> int:
        """Tokens of a sequence, about."""
        return self.tokens.shape[1] + round(self.lengths.float().mean().item())

    def draw(self, size: int, seed: int) -> Tensor:
        """Draw `size` sequences (size, P + height * width) by the seed alone.

        They have prompts of one length, that of a sequence drawn from all: so each is drawn as
        often as any other, and one view fits a step.
        """
        generator, count = generator_of(seed), len(self.tokens)
        shares = torch.tensor([1 - self.drop, self.drop], dtype=torch.float64)
        weights = shares.repeat_interleave(count)
        first = weights.multinomial(1, generator=generator)
        weights[self.lengths != self.lengths[first]] = 0
        drawn = weights.multinomial(size, replacement=True, generator=generator).tolist()
        prompts = [*self.prompts, *self.unconditional]
        return torch.stack([torch.cat([prompts[n], self.tokens[n % count].long()]) for n in drawn])


Data = TokenClips | TokenImages


def draw_batch(clips: Data, frames: int, size: int, seed: int, hold: float = 0.0) -> Tensor:
    """Draw `size` sequences by the seed alone; frames repeat the last with probability `hold`."""
    if isinstance(clips, TokenImages):
        return clips.draw(size, seed)
    generator = generator_of(seed)
    indices = torch.randint(len(clips.tokens), (size,), generator=generator)
    starts = torch.randint(clips.tokens.shape[1] - frames + 1, (size,), generator=generator)
    moves = torch.rand(size, frames - 1, generator=generator) >= hold
    times = torch.cat([starts[:, None], moves.long()], dim=1).cumsum(1)
    return sequences(clips, indices, times)


def windows(clips: TokenClips, size: int, frames: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Cut a window, at a position drawn with the seed, from each of the first `size` clips.

    Returns the model's ids, int64: tokens (size, frames, height, width), actions (size, frames, n).
    """
    num_clips, length = clips.tokens.shape[:2]
    for name, asked, there in (("clips", size, num_clips), ("frames", frames, length)):
        if not 1 <= asked <= there:
            raise ValueError(f"{name} must be in [1, {there}], got {asked}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(length - frames + 1, (size, 1), generator=generator)
    indices, times = torch.arange(size)[:, None], starts + torch.arange(frames)
    return clips.tokens[indices, times].long(), clips.ids_of_actions(indices, times)
