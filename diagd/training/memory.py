"""Memory of a finetuning run, estimated from a model's config before its weights are read.

It is what one process holds: frozen weights in bfloat16, float32 or int8, trained ones in float32
with gradients and an optimizer's state, and the activations that the backward pass needs: of all
blocks, or, if they are recomputed, the inputs of blocks and the activations of one.
"""

import os
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import usable_memory
from diagd.training.options import ADAPTED, FinetuneOptions

USABLE = 0.9  # share of the memory that a run may take: libraries and fragments need the rest
LOGIT_BYTES = 14  # of a logit: in bfloat16, float32, as a log-probability, and its gradient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part."""

    weights: int  # that are not trained, and copies in bfloat16
    trained: int  # weights
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))

    def __str__(self) -> str:
        parts = (f"{one.name} {getattr(self, one.name) / 1e9:.2f}" for one in fields(self))
        return f"{self.total / 1e9:.2f} GB ({', '.join(parts)})"


def estimate_memory(
    config: ModelConfig, options: FinetuneOptions, batch_size: int, num_lanes: int
) -> MemoryEstimate:
    """Estimate a run with `batch_size` sequences of `num_lanes` lanes, stand-ins included."""
    with torch.device("meta"):
        model = Transformer(config)
    products = [part for part in model.modules() if isinstance(part, nn.Linear)]
    in_products = sum(part.weight.numel() for part in products)
    total = sum(weight.numel() for weight in model.parameters())
    is_bf16 = options.precision == "bf16"
    if options.is_adapter:
        named = model.model.layers.named_modules()
        adapted = [part for name, part in named if name.rpartition(".")[2] in ADAPTED]
        sizes = sum(sum(part.weight.shape) for part in adapted if isinstance(part, nn.Linear))
        matrices = (options.lora or 0) * sizes
        trained = matrices + options.stand_in * config.hidden_size
        width = 1 if options.int8 else 2 if is_bf16 else 4
        weights = width * in_products + 4 * (total - in_products)
    else:
        matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
        trained, weights = total, 2 * in_products * is_bf16
    by_muon = matrices if options.optimizer == "muon" else 0
    size = 2 if is_bf16 else 4
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inner = (4 if config.mlp == "swiglu" else 2) * config.intermediate_size
    stream = 4 * config.hidden_size  # bytes of a lane in the residual stream, in float32
    block = 3 * stream + size * (4 * config.hidden_size + 2 * heads + inner)
    blocks = config.num_layers * (stream if options.recompute else block)
    blocks += block * bool(options.recompute)
    lane = blocks + LOGIT_BYTES * config.vocab_size
    activations = batch_size * num_lanes * lane + num_lanes**2  # and the mask
    return MemoryEstimate(weights, 4 * trained, 4 * trained, 8 * trained - 4 * by_muon, activations)


def plan_memory(
    config: ModelConfig, options: FinetuneOptions, batch_size: int, length: int
) -> tuple[FinetuneOptions, str]:
    """Decide whether blocks are recomputed, and describe the memory of a run.

    ValueError if sequences of `length` tokens do not fit in this machine's memory, or the GPU's.
    """
    lanes = length + options.frames * config.grid_height
    held, where = usable_memory(), "this machine"
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0"))
        held, where = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    choices = [False, True] if options.recompute is None else [options.recompute]
    needed = ""
    for recompute in choices:
        decided = replace(options, recompute=recompute)
        needed = estimate_memory(config, decided, batch_size, lanes)
        if needed.total <= USABLE * held:
            note = ", blocks recomputed" * recompute
            return decided, f"memory: about {needed} of {held / 1e9:.1f} GB{note}"
    advice = "--lora" if not options.is_adapter else "" if options.int8 else "--int8"
    others = "a smaller --batch-size or fewer --frames"
    raise ValueError(
        f"finetuning needs about {needed}, {where} has {held / 1e9:.1f} GB: use "
        + ", ".join(filter(None, (advice, others)))
    )
