"""Decode a Transformer on CUDA with our Triton kernels, in place of masked attention and sampling.

All else of a step is PyTorch's. The rule of visibility goes to the kernels as vectors, so a step
makes no mask; masked attention is still what a prefill runs, whose lanes are many.
"""

from typing import Any

from torch import Tensor

from diagd.backends.triton.kernels import load_kernels
from diagd.decoding.runner import ModelWrapper
from diagd.decoding.visibility import SlotRule
from diagd.models.attention import RuleKernel
from diagd.models.transformer import Transformer


class TritonModel(ModelWrapper[Transformer]):
    """A `Transformer`, its steps with our kernels.

    Args:
        model: on CUDA; its weights stay as they are.

    Raises:
        OSError: the kernels do not run here (see `diagd.backends.triton.kernels.load_kernels`).
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.kernels = load_kernels(model.config, model.dtype, model.device)

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> RuleKernel:
        """Leave the mask to the kernel."""
        return RuleKernel(self.kernels.attend, positions, SlotRule(steps, held, fed_at))

    def sample(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw as `diagd.decoding.sampling.sample` does, in one kernel."""
        return self.kernels.sample(*args, **kwargs)
