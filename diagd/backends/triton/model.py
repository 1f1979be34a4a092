"""Decode a Transformer on CUDA with our Triton kernels, in place of masked attention and sampling.

All else of a step is PyTorch's. The rule of visibility goes to the kernels as vectors, so a step
makes no mask; masked attention is still what a prefill runs, whose lanes are many.
"""

import torch
from torch import Tensor

from diagd.backends.triton.kernels import load_kernels
from diagd.decoding.runner import CausalModel
from diagd.decoding.sampling import SamplingOptions, ValidRanges
from diagd.decoding.visibility import SlotRule
from diagd.models.attention import RuleKernel
from diagd.models.cache import StaticKVCache
from diagd.models.transformer import Transformer


class TritonModel(CausalModel):
    """A `Transformer` behind the same protocol, its steps with our kernels.

    Args:
        model: on CUDA; its weights stay as they are.

    Raises:
        OSError: the kernels do not run here (see `diagd.backends.triton.kernels.load_kernels`).
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config
        self.kernels = load_kernels(model.config, model.dtype, model.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.model.vocab_size

    @property
    def num_embeddings(self) -> int:
        """Ids that may be fed: [0, num_embeddings)."""
        return self.model.num_embeddings

    @property
    def max_positions(self) -> int:
        """Longest sequence the model can hold."""
        return self.model.max_positions

    @property
    def relative_positions(self) -> bool:
        """Whether positions are told by rotation alone."""
        return self.model.relative_positions

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> StaticKVCache:
        """Allocate a cache; see `Transformer.make_cache`."""
        return self.model.make_cache(batch_size, num_slots, context)

    def renew_cache(self, cache: StaticKVCache, context: Tensor | None = None) -> bool:
        """Empty a cache; see `CausalModel.renew_cache`."""
        return self.model.renew_cache(cache, context)

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> RuleKernel:
        """Leave the mask to the kernel."""
        return RuleKernel(self.kernels.attend, positions, SlotRule(steps, held, fed_at))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | RuleKernel,
        cache: StaticKVCache,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Feed lanes; arguments as in `CausalModel.forward`.

        Args:
            visible: a mask, for PyTorch's attention, or what `see` returned.
        """
        return self.model(tokens, positions, slots, visible, cache, logits_to_keep)

    def sample(
        self,
        logits: Tensor,
        options: SamplingOptions,
        ranges: ValidRanges,
        seeds: Tensor,
        frames: Tensor,
        rows: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """Draw as `diagd.decoding.sampling.sample` does, in one kernel."""
        return self.kernels.sample(logits, options, ranges, seeds, frames, rows, columns)
