"""Load models: bundled, in our own format, as others released them, from the Hugging Face Hub.

Released checkpoints are recognised by their tensors (see `families/table.py`). Nothing in a file is
run. Every way it can be wrong is one line that names the file.
"""

import logging
from pathlib import Path

import torch

from diagd.families import presets
from diagd.families.family import Checkpoint
from diagd.families.hub import download, is_repository
from diagd.families.naming import describe
from diagd.families.own_format import CONFIG_FILE, WEIGHTS_FILE, is_ours, read_own
from diagd.families.presets import PRESETS, available_models
from diagd.families.released import read_released
from diagd.finite import as_finite
from diagd.models.transformer import Transformer

logger = logging.getLogger("diagd")


def model_path(name_or_path: str | Path) -> Path:
    """Return the folder of a bundled model, a path that exists, or a download (`user/name`).

    Raises:
        ValueError: The name is a preset, which has a config but no weights.
        FileNotFoundError: No such bundled model, file, folder or repository.
    """
    if str(name_or_path) in available_models():
        return presets.ASSETS / str(name_or_path)
    path = Path(name_or_path)
    if path.exists():
        return path
    if str(name_or_path) in PRESETS:
        raise ValueError(
            f"{str(name_or_path)!r} is a preset without weights: use Transformer.random"
            f"(PRESETS[{str(name_or_path)!r}]), or diagd bench, which fills it with random numbers"
        )
    nowhere = f"no model at {str(name_or_path)!r}"
    if is_repository(str(name_or_path)):
        try:
            return download(str(name_or_path))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{nowhere}, neither a file or folder nor {error}") from None
    raise FileNotFoundError(
        f"{nowhere}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, a released "
        f"checkpoint, a bundled model ({', '.join(available_models()) or 'none installed'}), or "
        "user/name on the Hugging Face Hub"
    )


def load_model(
    name_or_path: str | Path,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Load a bundled model, a checkpoint folder, or a released checkpoint file.

    Args:
        name_or_path: A name from `available_models`, our folder, or the checkpoint file of a
            family, or the folder that holds one; or `user/name` on the Hugging Face Hub, which is
            downloaded unless there is a folder of that name.
        config: A config file to read instead of the one beside the weights; of a released
            checkpoint in its original field names.
        device: Where to put the weights.
        dtype: Floating-point type to cast them to.

    Raises:
        ValueError: A preset name, a dtype that is no floating-point type, invalid JSON, a bad
            config, or a broken or unfitting weight file.
        FileNotFoundError: No such model, or a file of it is missing.
    """
    return build_model(find_model(name_or_path, config), device, dtype)


def build_model(found: Checkpoint, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Load what `find_model` found.

    Raises:
        ValueError: Tensors are missing, unknown, of another shape, or not finite (named); a
            dtype that is no floating-point type.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        expected = "a floating-point type of torch, such as torch.bfloat16"
        raise ValueError(f"dtype must be {expected}, got {dtype!r}")
    model = empty_model(found)
    logger.info("%s: %s", found.path, found.family.name)
    weights = {
        name: as_finite(weight, found.path, name, device, dtype)
        for name, weight in found.weights.items()
    }
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def find_model(name_or_path: str | Path, config: str | Path | None = None) -> Checkpoint:
    """Recognise what `load_model` would load; its weights stay on disk until they are used.

    Raises:
        ValueError, FileNotFoundError: As `load_model`.
    """
    path = model_path(name_or_path)
    side = None if config is None else Path(config)
    if path.is_dir() and is_ours(path, side):
        return read_own(path, side)
    return read_released(path, side)


def empty_model(checkpoint: Checkpoint) -> Transformer:
    """Return the model of a checkpoint without its weights, which it has seen to fit.

    Raises:
        ValueError: Tensors are missing, unknown or of another shape (named).
    """
    found, config = checkpoint.weights, checkpoint.config
    if config.num_layers > len(found):
        raise ValueError(
            f"{checkpoint.path}: does not fit the config: num_layers is {config.num_layers}, "
            f"and there are {len(found)} tensors in all"
        )
    with torch.device("meta"):
        model = Transformer(config)
    expected = model.state_dict()
    misshaped = [
        f"{name} (expected {tuple(expected[name].shape)}, got {tuple(found[name].shape)})"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    problems = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected],
        "mis-shaped": misshaped,
        "non-float": [name for name in found if not found[name].is_floating_point()],
    }
    parts = [describe(kind, names) for kind, names in problems.items() if names]
    if parts:
        raise ValueError(f"{checkpoint.path}: does not fit the config: {'; '.join(parts)}")
    return model
