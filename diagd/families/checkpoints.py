"""Load models, bundled, ours or released by others; save in our own format.

Ours is a folder with config.json and model.safetensors. It may hold more (the video tokenizer, the
action names); those files are left alone. Released checkpoints of Cosmos, WHAM and MineWorld are
recognised by their tensors. Nothing in a file is run. Every way it can be wrong is one line that
names the file.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diagd.families.naming import Source, describe
from diagd.families.released import convert_source, find_checkpoint, read_side, read_source
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.presets import PRESETS
from diagd.models.transformer import Transformer
from diagd.models.weight_files import read_weights, write_weights

logger = logging.getLogger("diagd")

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_FOREIGN_FIELDS = {"dim", "n_layers", "n_head", "num_attention_heads", "model", "model_type"}


@dataclass(frozen=True)
class FoundModel:
    """A checkpoint recognised and not yet loaded.

    Attributes:
        family: `diagd` (ours), `Cosmos`, `WHAM` or `MineWorld`.
        path: the file with the weights.
        config: what the model is.
        weights: under our names, mapped into memory.
        source: the released checkpoint as it is; None for ours.
    """

    family: str
    path: Path
    config: ModelConfig
    weights: dict[str, Tensor]
    source: Source | None


def available_models() -> list[str]:
    """Return the names of the bundled models, which `load_model` takes."""
    return sorted(path.parent.name for path in _ASSETS.glob(f"*/{WEIGHTS_FILE}"))


def model_path(name_or_path: str | Path) -> Path:
    """Return the checkpoint folder of a bundled model's name, or a path that exists.

    Raises:
        ValueError: The name is a preset, which has a config but no weights.
        FileNotFoundError: No such bundled model, file or folder.
    """
    if str(name_or_path) in available_models():
        return _ASSETS / str(name_or_path)
    path = Path(name_or_path)
    if path.exists():
        return path
    if str(name_or_path) in PRESETS:
        raise ValueError(
            f"{str(name_or_path)!r} is a preset without weights: use Transformer.random"
            f"(PRESETS[{str(name_or_path)!r}]), or diagd bench, which fills it with random numbers"
        )
    raise FileNotFoundError(
        f"no model at {str(name_or_path)!r}: expected a folder with {CONFIG_FILE} and "
        f"{WEIGHTS_FILE}, a released checkpoint, or a bundled model "
        f"({', '.join(available_models()) or 'none installed'})"
    )


def load_model(
    name_or_path: str | Path,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Load a bundled model, a checkpoint folder, or a released checkpoint file.

    Args:
        name_or_path: A name from `available_models`, our folder, or a checkpoint of Cosmos
            (model.pt), WHAM or MineWorld (.ckpt), or the folder that holds one.
        config: A config file to read instead of the one beside the weights; of a released
            checkpoint in its original field names.
        device: Where to put the weights.
        dtype: Floating-point type to cast them to.

    Raises:
        ValueError: A preset name, invalid JSON, a bad config, or a broken or unfitting weight file.
        FileNotFoundError: No such model, or a file of it is missing.
    """
    return build_model(find_model(name_or_path, config), device, dtype)


def build_model(found: FoundModel, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Load what `find_model` found.

    Raises:
        ValueError: Tensors are missing, unknown or of another shape (named).
    """
    model = empty_model(found)
    logger.info("%s: %s", found.path, found.family)
    weights = {name: weight.to(device, dtype) for name, weight in found.weights.items()}
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def find_model(name_or_path: str | Path, config: str | Path | None = None) -> FoundModel:
    """Recognise what `load_model` would load; its weights stay on disk until they are used.

    Raises:
        ValueError, FileNotFoundError: As `load_model`.
    """
    path = model_path(name_or_path)
    side = None if config is None else Path(config)
    if path.is_dir() and is_ours(path, side):
        settings = read_config(side or path / CONFIG_FILE)
        weights = read_weights(path / WEIGHTS_FILE)
        return FoundModel("diagd", path / WEIGHTS_FILE, settings, weights, None)
    file = find_checkpoint(path)
    source = read_source(file, side)
    renamed = convert_source(file, source)
    return FoundModel(renamed.family, file, renamed.config, renamed.weights, source)


def is_ours(folder: Path, config: Path | None = None) -> bool:
    """Whether a folder is of our own format, be it complete or not."""
    path = config or folder / CONFIG_FILE
    if not path.is_file():
        return not any(folder.glob("*.ckpt")) and not (folder / "model.pt").is_file()
    return path.suffix == ".json" and not _FOREIGN_FIELDS & set(read_side(path))


def save_model(
    model: Transformer, folder: str | Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors, in the model's dtype, each replaced in one move.

    A packed model is written with its plain weights.

    Args:
        weights: The model's state dict, where it had to be gathered from several processes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / WEIGHTS_FILE, model.state_dict() if weights is None else weights)
    write_config(folder / CONFIG_FILE, model.config)


def write_config(path: Path, config: ModelConfig) -> None:
    """Write a config as JSON, in one move."""
    write_json(path, config.to_dict(), indent=2)


def read_config(path: Path) -> ModelConfig:
    """Read a model config from a JSON file.

    Raises:
        ValueError: Not JSON, not an object, or a config `ModelConfig` refuses; names the file.
        FileNotFoundError: The file does not exist.
    """
    values = read_side(path)
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def empty_model(checkpoint: FoundModel) -> Transformer:
    """Return the model of a checkpoint without its weights, which it has seen to fit.

    Raises:
        ValueError: Tensors are missing, unknown or of another shape (named).
    """
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    found, expected = checkpoint.weights, model.state_dict()
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
