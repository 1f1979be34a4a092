"""What training lowers: mean negative log-likelihood, in nats, of the tokens to be predicted.

Actions are always given, so only visual tokens count. A sequence is read as a strategy would decode
it (`diagd.decoding.teacher_forcing`); raster order is next-token prediction.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from diagd.backends.native.trained_attention import mask_kernel
from diagd.decoding.teacher_forcing import TeacherView
from diagd.models.attention import Visible


class ViewLoss:
    """Mean negative log-likelihood, in nats, of the tokens that a view's lanes predict.

    Args:
        compiled: torch.compile it; on CUDA the mask is FlexAttention's then, which skips the
            blocks that nobody sees, and else the dense one of scaled_dot_product_attention.

    On CPUs with matrix units our own kernels attend where autocast rounds to bfloat16.
    """

    def __init__(self, view: TeacherView, device: torch.device, compiled: bool = False) -> None:
        self.view, lanes = view.to(device), len(view.positions)
        mask = self.view.visible()
        self.visible: Visible = mask
        self.visible_rounded: Visible = mask_kernel(mask, lanes) if device.type == "cpu" else None
        if compiled and device.type == "cuda" and mask is not None:
            self.visible = create_block_mask(self.view.mask_mod(), None, None, lanes, lanes, device)
        self._loss = torch.compile(view_loss) if compiled else view_loss
        self._logits = torch.compile(view_logits) if compiled else view_logits

    def __call__(
        self, model: nn.Module, tokens: Tensor, step: int = 0, fed: Tensor | None = None
    ) -> Tensor:
        """Return the loss of sequences (B, N) int64, others being fed in their place if given."""
        targets = tokens[:, self.view.targets[self.view.readers]]
        return self._loss(model, *self._lanes(tokens if fed is None else fed), targets)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return (B, M, V), what the model says of the M targets in raster order."""
        return self._logits(model, *self._lanes(tokens))

    def _lanes(self, fed: Tensor) -> tuple[Tensor, Tensor, Visible, Tensor]:
        view, visible = self.view, self.visible
        if self.visible_rounded is not None and torch.is_autocast_enabled("cpu"):
            visible = self.visible_rounded
        return fed[:, view.sources], view.positions, visible, view.readers


def view_logits(
    model: nn.Module, inputs: Tensor, positions: Tensor, visible: Visible, readers: Tensor
) -> Tensor:
    """Return the logits (B, M, V) of the lanes to read.

    Args:
        inputs: (B, N) int64 token ids of the lanes.
        positions: (N,) int64.
        visible: who sees whom among the lanes.
        readers: (M,) int64, the lanes to read.
    """
    return model(inputs, positions=positions, visible=visible, logits_to_keep=readers)


def view_loss(
    model: nn.Module,
    inputs: Tensor,
    positions: Tensor,
    visible: Visible,
    readers: Tensor,
    targets: Tensor,
) -> Tensor:
    """Return the mean negative log-likelihood of the targets (B, M) int64 (see `view_logits`)."""
    logits = view_logits(model, inputs, positions, visible, readers)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
