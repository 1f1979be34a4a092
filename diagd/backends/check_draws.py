"""Hold the draws of kernels that are new here against PyTorch's."""

from collections.abc import Callable

import torch
from torch import Tensor

from diagd.decoding.sampling import UNDRAWN, Draw, SamplingOptions, ValidRanges, sample


@torch.inference_mode()
def check_draws(
    sample_by_kernel: Callable[[Tensor, Draw], Tensor],
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError where draws differ."""
    lanes = torch.arange(40, device=device)
    logits = torch.randn(3, 40, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7, 5] = torch.nan
    logits = logits.to(device, dtype)
    ranges, seeds = ValidRanges(2, vocab_size - 1, None), lanes[:3] + 2**40
    for options in (SamplingOptions(), SamplingOptions(0.8, top_k=30, top_p=0.9)):
        draw = Draw(options, ranges, seeds, lanes, lanes, lanes)
        drawn, expected = sample_by_kernel(logits, draw), sample(logits, draw)
        differing = int((drawn != expected).sum())
        if differing > 1 or drawn[0, 7] != UNDRAWN:  # rounding may turn a draw
            raise ValueError(f"{differing} of {drawn.numel()} draws differ under {options}")
