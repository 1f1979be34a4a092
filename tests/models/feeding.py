"""Feed a sequence to any model of the protocol in a scrambled order, through a scrambled cache."""

from typing import Any

import torch
from torch import Tensor

from diagd.decoding.visibility import Seen


def scrambled_steps(length: int, num_steps: int, seed: int = 0) -> Tensor:
    """Give every position of a sequence a step, in no order; (length,) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_steps, (length,), generator=generator)


def visible_under(steps: Tensor) -> Tensor:
    """Decoding's rule: not later in raster order, and fed no later. (length, length) bool."""
    order = torch.arange(len(steps))
    return (order[None] <= order[:, None]) & (steps[None] <= steps[:, None])


def feed(model: Any, tokens: Tensor, steps: Tensor, seed: int = 0) -> Tensor:
    """Feed tokens (B, N) at their steps; return logits (B, N, V).

    Slots are a permutation of positions, lanes of a step stand in no order, every step has two
    padded lanes at the scratch slot, and M is below the number of slots.
    """
    batch_size, length = tokens.shape
    generator = torch.Generator().manual_seed(seed + 1)
    slot_of = torch.randperm(length, generator=generator)
    cache = model.make_cache(batch_size, length + 4)
    scratch = length + 3
    logits = torch.full((batch_size, length, model.vocab_size), torch.nan)  # on the CPU
    rule = visible_under(steps)
    for step in range(int(steps.max()) + 1):
        lanes = (steps == step).nonzero()[:, 0]
        lanes = lanes[torch.randperm(len(lanes), generator=generator)]
        visible = torch.zeros(len(lanes) + 2, length + 1, dtype=torch.bool)
        visible[: len(lanes), slot_of] = rule[lanes]
        padded = torch.zeros(2, dtype=torch.int64)
        positions = torch.cat([lanes, padded]).to(model.device)
        held = torch.full((length + 1,), -1).scatter(0, slot_of, torch.arange(length))
        out = model.forward(
            tokens[:, torch.cat([lanes, padded])].to(model.device),
            positions,
            torch.cat([slot_of[lanes], padded + scratch]).to(model.device),
            Seen.of_mask(visible.to(model.device), positions, held.to(model.device)),
            cache,
        )
        logits[:, lanes] = out[:, : len(lanes)].to(logits)
    return logits


def causal(positions: Tensor, held: Tensor) -> Seen:
    """See all that is not later."""
    return Seen(positions, positions, held, held)
