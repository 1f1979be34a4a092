"""Run a plan of diagd on a plain model of transformers: its own cache, no engine of ours.

What a serving engine needs of diagd is data: `diagd plan --grid 1x32x32 -k 1 --lanes --json`, or as
here. Its cache may keep what was fed in any order, if attention is told who sees whom.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

NEVER = 2**31
Turn = Callable[[Tensor], Tensor]  # places in raster order (L,) -> position ids (1, L) or (3, 1, L)


@torch.inference_mode()
def write(
    model: Any,
    prompt: Tensor,
    plans: Sequence[dict[str, Any]],
    num_codes: int,
    turn: Turn = lambda places: places[None],
) -> Tensor:
    """Return the tokens (N,) that plans write, one after the other, behind a prompt (P,) int64."""
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"  # it changed in 5.24
    cache, tokens = DynamicCache(), prompt.tolist()
    # of all that the cache holds, in the order in which it was fed: its place, and its step
    places, fed_at = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    def feed(at: list[int], ids: list[int], step: int, stands_in: list[bool]) -> Tensor:
        nonlocal places, fed_at
        lanes, is_new = torch.tensor(at), torch.arange(len(at))[:, None] + len(places)
        places = torch.cat([places, lanes])
        steps = torch.full_like(lanes, step).masked_fill(torch.tensor(stands_in), NEVER)
        fed_at = torch.cat([fed_at, steps])
        seen = (fed_at <= step) & (places <= lanes[:, None])
        seen |= is_new == torch.arange(len(places))  # itself
        mask = torch.zeros(seen.shape, dtype=model.dtype)
        mask = mask.masked_fill(~seen, torch.finfo(model.dtype).min)[None, None]
        told = {"attention_mask": mask, "position_ids": turn(lanes), cache_name: cache}
        return model(input_ids=torch.tensor([ids]), use_cache=True, **told).logits[0]

    count, now = len(tokens) - 1, 0
    feed([*range(count)], tokens[:-1], 0, [False] * count)
    for plan in plans:
        base, fed = len(tokens), plan["fed_at"]
        tokens += [-1] * len(fed)
        for step, lanes in enumerate(plan["steps"]):
            at, inputs = lanes["positions"], lanes["inputs"]
            ids = [tokens[base + slot] for slot in inputs]
            stands_in = [place != slot for place, slot in zip(at, inputs, strict=True)]
            logits = feed([base + place for place in at], ids, now + step, stands_in)
            drawn = logits[:, :num_codes].argmax(-1).tolist()  # or any other rule
            for slot, token in zip(lanes["outputs"], drawn, strict=True):
                if slot is not None:
                    tokens[base + slot] = token
        now += len(plan["steps"])
    return torch.tensor(tokens[len(prompt) :])
