"""VQModels of diffusers from a config and named weights, with errors that name what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.tokenizers.storage import check_weights


def build_vq_model(config: dict[str, Any], path: Path) -> Any:
    """Build the model that a config describes, with random weights.

    Args:
        path: where the config was read, for the message.

    Raises:
        ValueError: it describes something else.
    """
    kind = config.get("_class_name")
    if kind != "VQModel":
        raise ValueError(f"{path}: _class_name must be VQModel, got {kind!r}")
    # It takes seconds to import, and whoever only loads a model needs none.
    from diffusers.models.autoencoders.vq_model import VQModel

    try:
        return VQModel.from_config(config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no VQModel: {str(error).splitlines()[0]}") from None


def fill_vq_model(model: Any, weights: Mapping[str, Tensor], where: str | Path) -> None:
    """Copy weights into a model as float32.

    Args:
        where: what holds the weights, for the message.

    Raises:
        ValueError: weights are missing, unknown or of another shape (named).
    """
    check_weights(where, weights, model.state_dict())
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    model.to(memory_format=memory_format(model))


def memory_format(model: Any) -> torch.memory_format:
    """Return how feature maps should lie in memory.

    Models of patches run channels last, which a CPU does faster; those of pixels as in diffusers,
    so that their numbers are the same to the last bit.
    """
    return torch.channels_last if model.config.in_channels > 3 else torch.contiguous_format
