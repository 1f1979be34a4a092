"""Checks of what comes in from outside, before any work starts."""

from torch import Tensor, int64

from diagd.decoding.schedule import SequenceLayout, TokenGrid, whole


def check_prompt(
    prompt: Tensor, layout: SequenceLayout, batch_size: int, max_slots: int, num_embeddings: int
) -> None:
    """Refuse a prompt of another shape, with foreign ids, or without room for one frame.

    Args:
        layout: of one frame after the prompt, with its context frames.
    """
    if prompt.ndim != 2 or prompt.shape[0] != batch_size or prompt.dtype != int64:
        raise ValueError(
            f"prompt must be int64 of shape (batch={batch_size}, P), "
            f"got {prompt.dtype} of shape {tuple(prompt.shape)}"
        )
    if prompt.shape[1] < layout.context_slots:
        raise ValueError(
            f"context_frames={layout.context_frames} take {layout.context_slots} tokens, "
            f"got a prompt of {prompt.shape[1]}"
        )
    if prompt.shape[1] + layout.num_slots > max_slots:
        raise ValueError(
            f"prompt and one frame take {prompt.shape[1] + layout.num_slots} slots, "
            f"the context holds {max_slots}"
        )
    check_ids(prompt, num_embeddings, "prompt")


def check_room(layout: SequenceLayout, num_prefix: int, max_slots: int) -> None:
    """Refuse a stream that would be stuck once its context is full.

    Args:
        layout: of one frame after those that stay when old ones are dropped.
    """
    kept = layout.context_frames
    slots = num_prefix + layout.context_slots + layout.slots_per_frame
    if slots > max_slots:
        raise ValueError(
            f"keep_frames={kept} and one more frame take {slots} slots, "
            f"the context holds {max_slots} slots"
        )
    if not kept and not num_prefix and not layout.num_action_tokens:
        raise ValueError("keep_frames must be at least 1 without prefix and actions, got 0")


def check_grid(grid: TokenGrid, frame: TokenGrid, num_frames: int | None) -> None:
    """Refuse a schedule for frames of another size, or for another number of them."""
    if (grid.height, grid.width) != (frame.height, frame.width):
        raise ValueError(
            f"schedule must be for frames of {frame.height}x{frame.width}, "
            f"got {grid.height}x{grid.width}"
        )
    if num_frames not in (None, grid.num_frames):
        raise ValueError(
            f"the schedule is for {grid.num_frames} frames, got num_frames={num_frames}"
        )


def check_actions(
    actions: Tensor | None, layout: SequenceLayout, batch_size: int, num_embeddings: int
) -> None:
    """Refuse actions of another shape or with foreign ids; None is right where there are none."""
    shape = (batch_size, layout.grid.num_frames, layout.num_action_tokens)
    if actions is None and not layout.num_action_tokens:
        return
    if actions is None or actions.shape != shape or actions.dtype != int64:
        given = None if actions is None else f"{actions.dtype} of shape {tuple(actions.shape)}"
        raise ValueError(
            f"actions must be int64 of shape (batch, frames, tokens) = {shape}, got {given}"
        )
    check_ids(actions, num_embeddings, "actions")


def check_seeds(seed: int | list[int], batch_size: int) -> list[int]:
    """Return one seed for each batch row."""
    given = seed if isinstance(seed, list) else [whole(seed, "seed") + b for b in range(batch_size)]
    seeds = [whole(value, "seed") for value in given]
    if len(seeds) != batch_size:
        raise ValueError(f"expected one seed for each of {batch_size} batch rows, got {len(seeds)}")
    for value in seeds:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {value}")
    return seeds


def check_ids(ids: Tensor, limit: int, name: str) -> None:
    """Refuse what are no int64 ids, or foreign ones."""
    if ids.dtype != int64:
        raise ValueError(f"{name} must be int64, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} ids must be in [0, {limit}), got {int(ids.min())}..{int(ids.max())}"
        )
