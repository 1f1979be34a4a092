"""Frames and actions as the one sequence of tokens that a model continues."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, Actions, as_actions
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VideoTokenizer


def check_size(frames: Tensor, size_px: tuple[int, int]) -> None:
    """Raise ValueError unless frames are (T, H_px, W_px, 3) of the model's size."""
    if frames.ndim != 4 or frames.shape[1:] != (*size_px, 3):
        height_px, width_px = size_px
        raise ValueError(
            f"frames must be (T, {height_px}, {width_px}, 3) uint8, got {tuple(frames.shape)}"
        )


def check_clip(given: int, coming: int, num_grids: int, config: ModelConfig) -> None:
    """Refuse a clip that must not slide, since a grid of several frames depends on the first."""
    held = config.max_positions // config.tokens_per_frame
    if num_grids > held:
        raise ValueError(
            f"{given} frames and {coming} to come are {num_grids} grids, the model holds {held}"
        )


def grids_of(num_frames: int, step: int) -> int:
    """Return the token grids of generated frames, `step` of which the tokenizer joins.

    Raises:
        ValueError: no whole number of grids.
    """
    if num_frames % step:
        raise ValueError(
            f"num_frames must be a multiple of {step}: the tokenizer joins so many frames, "
            f"got {num_frames}"
        )
    return num_frames // step


def paint(tokenizer: VideoTokenizer, context: Tensor, grids: Tensor) -> Tensor:
    """Return the pixels of generated grids, behind those of the context if they depend on it."""
    if tokenizer.temporal_compression > 1:
        grids = torch.cat([context, grids])
    return tokenizer.decode(grids)


def action_ids(
    codec: ActionCodec | None,
    actions: Actions | None,
    count: int,
    what: str,
    first_id: int,
) -> Tensor | None:
    """Return (1, count, num_tokens) ids, or None for a model without actions.

    Args:
        what: each action stands before, for the error.
        first_id: id of the codec's local id 0.

    Raises:
        ValueError: not `count` actions, one that the codec does not know, or any without a codec.
    """
    if codec is None:
        if actions is not None and len(actions):
            raise ValueError("this model takes no actions")
        return None
    names = [] if actions is None else as_actions(actions, codec, count)
    if len(names) != count:
        raise ValueError(f"expected {count} actions, one for each {what}, got {len(names)}")
    ids = [codec.tokens_of(name) for name in names]
    local = torch.tensor(ids, dtype=torch.int64).view(1, count, codec.num_tokens)
    return local + first_id


def prompt_tokens(prefix: Sequence[int], grids: Tensor, actions: Tensor | None) -> Tensor:
    """Return (1, P): prefix, and the grids with the actions between them.

    Args:
        grids: (T, height, width) int64.
        actions: (1, T - 1, n) int64, or None.
    """
    tokens = grids.flatten(1)
    if actions is not None:
        first = actions.new_zeros(1, actions.shape[2])  # nothing stands before the first frame
        between = torch.cat([first, actions[0]])
        tokens = torch.cat([between, tokens], dim=1).flatten()[actions.shape[2] :]
    return torch.cat([tokens.new_tensor(list(prefix)), tokens.flatten()])[None]
