"""Our own folders: config.json and model.safetensors, and what makes a world of a model.

The latter is `tokenizer/`, `actions.json` and, where a model is used in a manner of its own,
`generation.json`. A folder may hold more (a prompt, a walk); those files are left alone.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, ActionVocabulary
from diagd.families import table
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source
from diagd.families.released import file_patterns, read_side, released_formats
from diagd.families.tokenizer_loading import load_tokenizer
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.models.weight_files import read_weights, write_weights
from diagd.tokenizers.vq import VideoTokenizer

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
TOKENIZER_FOLDER, ACTIONS_FILE, DEFAULTS_FILE = "tokenizer", "actions.json", "generation.json"
FORMER_DEFAULTS_FILE = "habits.json"  # its name in folders that were written before


@runtime_checkable
class StorableTokenizer(Protocol):
    """A tokenizer that can be written into a folder of ours."""

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype) -> None:
        """Write its files, with weights of this type."""
        ...


def is_ours(folder: Path, config: Path | None = None) -> bool:
    """Whether a folder is of our own format, be it complete or not."""
    path = config or folder / CONFIG_FILE
    if not path.is_file():
        theirs = (pattern for pattern in file_patterns() if pattern != WEIGHTS_FILE)
        return not any(any(folder.glob(pattern)) for pattern in theirs)
    if path.suffix != ".json":
        return False
    fields = read_side(path).keys()
    return not any(released.config_fields & fields for released in released_formats())


def read_own(folder: Path, config: Path | None = None) -> Checkpoint:
    """Read a folder of ours; weights stay on disk.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged (named).
    """
    settings = read_config(config or folder / CONFIG_FILE)
    weights = read_weights(folder / WEIGHTS_FILE)
    return Checkpoint(OWN, folder / WEIGHTS_FILE, settings, weights, Source(weights, {}, {}))


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


def save_model(
    model: Transformer, folder: str | Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors, in the model's dtype, each replaced in one move.

    A packed model is written with its plain weights.

    Args:
        model: What `load_model` returns, or a model in training.
        folder: Where to; made if there is none. `load_model` takes it.
        weights: The model's state dict, where it had to be gathered from several processes.
    """
    write_checkpoint(Path(folder), model.config, model.state_dict() if weights is None else weights)


def write_checkpoint(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write what a model is and its weights, in their own types; each file is replaced in one move.

    The weights come last: where they are, all is there.
    """
    write_json(folder / CONFIG_FILE, config.to_dict(), indent=2)
    write_weights(folder / WEIGHTS_FILE, weights)


def save_tokenizer(folder: Path, tokenizer: VideoTokenizer) -> None:
    """Write a tokenizer into a folder of ours, to the last bit.

    Raises:
        ValueError: TorchScript, which stays where the user put it.
    """
    if not isinstance(tokenizer, StorableTokenizer):
        raise ValueError(f"a {type(tokenizer).__name__} cannot be stored in {folder}")
    tokenizer.save_pretrained(folder / TOKENIZER_FOLDER, torch.float32)


def read_actions_file(path: Path) -> ActionCodec:
    """Read `actions.json`: names of a vocabulary, or the family whose actions they are.

    Raises:
        FileNotFoundError, ValueError: no such file, or nothing of the kind in it.
    """
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("kind") if path.is_file() else None
    except (ValueError, RecursionError, AttributeError):
        kind = None  # told by ActionVocabulary
    codecs = (family.actions for family in table.FAMILIES if family.name == kind)
    return next(codecs, None) or ActionVocabulary.load(path)


def write_actions_file(path: Path, codec: ActionCodec) -> None:
    """Write what `read_actions_file` reads."""
    kinds = [family.name for family in table.FAMILIES if family.actions == codec]
    write_json(path, {"kind": kinds[0]} if kinds else {"names": list(codec.names)})


def write_defaults(folder: Path, defaults: GenerationDefaults) -> None:
    """Write `generation.json`."""
    write_json(folder / DEFAULTS_FILE, asdict(defaults))


def _tokenizer(found: Checkpoint) -> VideoTokenizer | None:
    folder = found.path.with_name(TOKENIZER_FOLDER)
    return load_tokenizer(folder) if folder.is_dir() else None


def _defaults(found: Checkpoint) -> GenerationDefaults:
    defaults = _stored_defaults(found)
    if not found.config.num_action_tokens:  # a grid may be several frames (Cosmos)
        return defaults
    most = max(1, found.config.frames_held - 1)  # one frame is to come
    return replace(defaults, context_frames=min(defaults.context_frames, most))


def _stored_defaults(found: Checkpoint) -> GenerationDefaults:
    for name in (DEFAULTS_FILE, FORMER_DEFAULTS_FILE):
        path = found.path.with_name(name)
        if path.is_file():
            try:
                return replace(GenerationDefaults(), **json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, RecursionError, TypeError) as error:
                raise ValueError(f"{path}: no generation defaults: {error}") from None
    return GenerationDefaults()


OWN = Family(name="diagd", tokenizer=_tokenizer, defaults=_defaults)
