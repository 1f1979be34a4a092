"""Training sequences cut out of token clips: frame, action, frame, action, frame ..."""

import torch
from torch import Tensor

from diagd.data.token_shards import TokenClips


def sequences(clips: TokenClips, indices: Tensor, starts: Tensor, frames: int) -> Tensor:
    """Cut windows out of clips and interleave frames with the actions between them.

    Args:
        indices, starts: (B,) int64, which clip and its first frame.

    Returns:
        (B, frames * (height * width + 1) - 1) int64; action ids follow the visual ids.
    """
    times = starts[:, None] + torch.arange(frames)
    visual = clips.tokens[indices[:, None], times].flatten(2).long()
    actions = clips.actions[indices[:, None], times].long() + clips.codebook_size
    return torch.cat([actions[..., None], visual], dim=2).flatten(1)[:, 1:]


def draw_batch(clips: TokenClips, frames: int, size: int, seed: int) -> Tensor:
    """Return `size` sequences that the seed names, whatever was drawn before."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(clips.tokens), (size,), generator=generator)
    starts = torch.randint(clips.tokens.shape[1] - frames + 1, (size,), generator=generator)
    return sequences(clips, indices, starts, frames)
