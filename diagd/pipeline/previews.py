"""Previews: pictures of an image some of whose tokens are not written yet."""

from functools import lru_cache

import torch
from torch import Tensor

from diagd.decoding.engine import Stream
from diagd.decoding.schedule import Order, steps_of_frame
from diagd.decoding.strategies.table import Strategy
from diagd.pipeline.generator import VideoGenerator

GREY = 128  # pixel value where no token is written yet


def preview_due(
    stream: Stream, strategy: Strategy, num_previews: int, shown: int
) -> tuple[int, Tensor | None]:
    """Return the number of the preview that is due, and which tokens are written if it is new.

    Previews are due after equal shares of the steps, or of exact tokens; `shown` were due before.
    (height, width) bool of a stream's first frame.
    """
    grid = stream.frame.grid
    if shown >= num_previews or not stream.num_steps:
        return shown, None
    if strategy.has_schedule:
        order, done = strategy.schedule(grid), stream.num_steps
        written_at, total = _written_at(order), order.num_steps
    else:
        done, total = sum(one.num_accepted for one in stream.verified), grid.num_tokens
        written_at = torch.arange(total)
    if (due := done * (num_previews + 1) // total) <= shown:
        return shown, None
    return due, (written_at < done).view(grid.height, grid.width)


@lru_cache(maxsize=16)
def _written_at(order: Order) -> Tensor:
    return torch.tensor(steps_of_frame(order))


@torch.inference_mode()
def paint(world: VideoGenerator, tokens: Tensor, known: Tensor | None = None) -> Tensor:
    """Return the picture of an image, (H_px, W_px, 3) uint8, grey where no token is written yet.

    `tokens` are (height, width) int64, `known` says which are written, None: all. The tokenizer
    decodes the token above in place of a missing one.
    """
    if known is not None:
        tokens = tokens.clone()
        tokens[0, ~known[0]] = tokens[0, 0]
        for row in range(1, len(tokens)):
            tokens[row] = torch.where(known[row], tokens[row], tokens[row - 1])
    pixels = world.tokenizer.decode(tokens[None].to(world.model.device))[-1].cpu()
    if known is not None:
        side = world.tokenizer.compression
        written = known.repeat_interleave(side, 0).repeat_interleave(side, 1)
        pixels[~written[:, : pixels.shape[1]]] = GREY  # a row-end column has no pixels
    return pixels
