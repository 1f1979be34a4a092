"""Save and load our own checkpoint folders: config.json and model.safetensors.

A folder may hold more (the video tokenizer, the action names); those files are left alone. Nothing
is unpickled. Every way a folder can be wrong is one line that names the file.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diagd.models.config import PRESETS, ModelConfig
from diagd.models.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_NAMES_SHOWN = 3


def available_models() -> list[str]:
    """Return the names of the bundled models, which `load_model` takes."""
    return sorted(path.parent.name for path in _ASSETS.glob(f"*/{WEIGHTS_FILE}"))


def model_folder(name_or_path: str | Path) -> Path:
    """Return the checkpoint folder of a bundled model's name, or of a path.

    Raises:
        ValueError: The name is a preset, which has a config but no weights.
        FileNotFoundError: No such bundled model and no such folder.
    """
    if str(name_or_path) in available_models():
        return _ASSETS / str(name_or_path)
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    if str(name_or_path) in PRESETS:
        raise ValueError(
            f"{str(name_or_path)!r} is a preset without weights: use Transformer.random"
            f"(PRESETS[{str(name_or_path)!r}]), or diagd bench, which fills it with random numbers"
        )
    raise FileNotFoundError(
        f"no model at {str(name_or_path)!r}: expected a folder with {CONFIG_FILE} and "
        f"{WEIGHTS_FILE}, or a bundled model ({', '.join(available_models()) or 'none installed'})"
    )


def load_model(
    name_or_path: str | Path,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Load a bundled model or a checkpoint folder.

    Args:
        name_or_path: A name from `available_models`, or a folder.
        config: A config file to read instead of the folder's own.
        device: Where to put the weights.
        dtype: Floating-point type to cast them to.

    Raises:
        ValueError: A preset name, invalid JSON, a bad config, or a broken or unfitting weight file.
        FileNotFoundError: No such model, or a file of it is missing.
    """
    folder = model_folder(name_or_path)
    with torch.device("meta"):
        model = Transformer(read_config(folder / CONFIG_FILE if config is None else Path(config)))
    weights = _read_weights(folder / WEIGHTS_FILE)
    _check_weights(folder / WEIGHTS_FILE, weights, model.state_dict())
    weights = {name: weight.to(device, dtype) for name, weight in weights.items()}
    model.load_state_dict(weights, assign=True)
    return model.to(device)


def save_model(
    model: Transformer, folder: str | Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors, in the model's dtype, each replaced in one move.

    A packed model is written with its plain weights.

    Args:
        weights: The model's state dict, where it had to be gathered from several processes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict() if weights is None else weights
    weights = {name: weight.contiguous().cpu() for name, weight in weights.items()}
    text = json.dumps(model.config.to_dict(), indent=2) + "\n"
    _replace_file(folder / WEIGHTS_FILE, lambda path: save_file(weights, path, {"format": "pt"}))
    _replace_file(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def read_config(path: Path) -> ModelConfig:
    """Read a model config from a JSON file.

    Raises:
        ValueError: Not JSON, not an object, or a config `ModelConfig` refuses; names the file.
        FileNotFoundError: The file does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file: {error}") from None


def _check_weights(path: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
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
    parts = [_describe(kind, names) for kind, names in problems.items() if names]
    if parts:
        raise ValueError(f"{path}: does not fit the config: {'; '.join(parts)}")


def _describe(kind: str, names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {shown}"


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
