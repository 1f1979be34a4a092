"""MineWorld's image tokenizer: a VQModel of diffusers, whose code rounds pixels down."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from diagd.families.family import Checkpoint
from diagd.families.mineworld.weights import TOKENIZER_PREFIX
from diagd.tokenizers.storage import read_config, read_tensors
from diagd.tokenizers.vq import VQTokenizer
from diagd.tokenizers.vq_models import load_vq_model


def tokenizer_of(found: Checkpoint) -> VQTokenizer:
    """Build the tokenizer that the YAML names, from the main checkpoint or its own file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: no config names a tokenizer, or see `mineworld_tokenizer`.
    """
    settings = found.source.side
    for key in ("model", "params", "tokenizer_config", "params"):
        settings = settings.get(key, {})
    if "config_path" not in settings:
        raise ValueError(
            f"{found.path}: no config names its tokenizer: name the folder with --tokenizer"
        )
    root, tensors = found.path.parent, found.source.tensors
    is_inside = any(name.startswith(TOKENIZER_PREFIX) for name in tensors)
    weights = tensors if is_inside else root / settings["ckpt_path"]
    return mineworld_tokenizer(root / settings["config_path"], weights)


def mineworld_tokenizer(
    config: str | Path, weights: str | Path | Mapping[str, Tensor]
) -> VQTokenizer:
    """Load the VQ-VAE of a MineWorld checkpoint.

    A main checkpoint keeps its weights under `tokenizer.model.`, beside the transformer; then the
    rest is left out. `vae.ckpt` has nothing else, under `model.`.

    Args:
        config: config.json of the diffusers VQModel.
        weights: `vae.ckpt`, a main checkpoint that holds the tokenizer too, or named tensors.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt or unsafe, no VQModel, or does not fit the other.
    """
    described = read_config(Path(config))
    given = isinstance(weights, Mapping)
    tensors = weights if given else read_tensors(Path(weights))
    inside = {name: t for name, t in tensors.items() if name.startswith(TOKENIZER_PREFIX)}
    plain = {
        name.removeprefix(TOKENIZER_PREFIX).removeprefix("model."): tensor
        for name, tensor in (inside or tensors).items()
    }
    where = "the tokenizer" if given else weights
    model = load_vq_model(described, Path(config), plain, where)
    return VQTokenizer(model, pixel_rounding="down")
