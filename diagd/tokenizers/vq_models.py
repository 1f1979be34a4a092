"""VQModels of diffusers from a config and named weights, with errors that name what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.tokenizers.storage import check_weights


def load_vq_model(
    config: dict[str, Any], path: Path, weights: Mapping[str, Tensor], where: str | Path
) -> Any:
    """Build the model that a config describes around its weights, as float32.

    Sizes that the config only claims are never allocated.

    Args:
        path: where the config was read, for the message.
        where: what holds the weights, for the message.

    Raises:
        ValueError: the config describes something else, or the weights are missing, unknown, of
            another shape or not finite (named).
    """
    kind, layers = config.get("_class_name"), config.get("layers_per_block", 1)
    if kind != "VQModel":
        raise ValueError(f"{path}: _class_name must be VQModel, got {kind!r}")
    if not isinstance(layers, int) or layers > len(weights):
        raise ValueError(
            f"{path}: layers_per_block must be at most the {len(weights)} tensors of {where}, "
            f"got {repr(layers)[:20]}"
        )
    # It takes seconds to import, and whoever only loads a model needs none.
    from diffusers.models.autoencoders.vq_model import VQModel

    try:
        with torch.device("meta"):
            model: Any = VQModel.from_config(config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{path} describes no VQModel: {str(error).splitlines()[0]}") from None
    check_weights(where, weights, model.state_dict())
    own = {name: value.float().clone() for name, value in weights.items()}  # the file may change
    model.load_state_dict(own, assign=True)
    return model.to(memory_format=memory_format(model))


def memory_format(model: Any) -> torch.memory_format:
    """Return how feature maps should lie in memory.

    Models of patches run channels last, which a CPU does faster; those of pixels as in diffusers,
    so that their numbers are the same to the last bit.
    """
    return torch.channels_last if model.config.in_channels > 3 else torch.contiguous_format
