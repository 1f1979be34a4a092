"""Images whose rows end in a token: the loop of transformers, and diagonals without a cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import diagd
from diagd.families.family import TextIds
from tests import oracles


def raster_images(
    model: Any,
    prompts: Tensor,
    negatives: Tensor,
    scale: float,
    visual: list[int],
    height: int,
    width: int,
) -> Tensor:
    """Generate greedily (B, height, width + 1) of their ids; the last of `visual` ends each row."""
    length = prompts.shape[1]
    *codes, row_end = visual

    def allowed(_: int, sequence: Tensor) -> list[int]:
        at_end = (len(sequence) - length) % (width + 1) == width
        return [row_end] if at_end else codes

    guided = {"guidance_scale": scale, "negative_prompt_ids": negatives} if scale != 1 else {}
    sequences = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=height * (width + 1),
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        **guided,
    )
    return sequences[:, length:].view(-1, height, width + 1)


def diagonal_image(
    full: Callable[[Tensor, Tensor, Tensor], Tensor],
    ids: TextIds,
    scale: float,
    num_codes: int,
    height: int,
    width: int,
    row_lag: int,
) -> Tensor:
    """Generate in our ids, (1, height, width + 1): both prompts whole, each in its own forward.

    Args:
        full: tokens, positions and what sees what -> logits of codes and row end.
    """
    length, other = ids.prompt.shape[1], ids.unconditional.shape[1]

    def logits_fn(tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        rest = positions >= length
        seen = torch.ones(other + int(rest.sum()), other + int(rest.sum())).tril().bool()
        seen[other:, other:] = visible[rest][:, rest]
        without = torch.cat([ids.unconditional, tokens[:, rest]], 1)
        places = torch.cat([torch.arange(other), positions[rest] + other - length])
        null = full(without, places, seen)[:, other - 1 :]
        logits = full(tokens, positions, visible)
        logits[:, length - 1 :] = null + scale * (logits[:, length - 1 :] - null)
        return logits

    def choose(logits: Tensor, _frame: int, _row: int, column: int) -> Tensor:
        is_end = column == width
        return logits[:, :num_codes].argmax(-1) * (not is_end) + num_codes * is_end

    reference = oracles.ReferenceStream(
        logits_fn, ids.prompt, height, width + 1, sample_fn=choose, row_ends=[num_codes] * height
    )
    grid = diagd.TokenGrid(1, height, width + 1)
    frame_lag = diagd.DiagonalSchedule(grid, row_lag).num_steps
    return reference.decode(1, row_lag, frame_lag)[0]
