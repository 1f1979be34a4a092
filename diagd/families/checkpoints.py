"""Checkpoints, from a name to a model: path, config, weights, tokenizer, actions, defaults.

A checkpoint is a folder of ours (config.json, model.safetensors, and the parts of a world:
tokenizer/, actions.json, generation.json), or one released by a family, which is recognised by its
tensors and translated. Weights stay on disk until a model is built around them.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, errors, snapshot_download
from torch import Tensor

from diagd.checks import brief
from diagd.data.actions import ActionCodec
from diagd.data.vectors import OwnActions, load_actions
from diagd.families import presets, table
from diagd.families.adapters import ADAPTER_FILE, adapted
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source
from diagd.families.presets import PRESETS, available_models
from diagd.files import (
    MISFITS,
    copy_whole,
    naming,
    read_json_object,
    read_text,
    require_file,
    require_folder,
    write_json,
)
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import fingerprint
from diagd.tokenizers.text import TextPrompts
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from diagd.weight_files import (
    Change,
    assign_weights,
    check_fit,
    read_tensors,
    read_torch_file,
    read_weights,
    tensors_of,
    unchanged,
    write_weights,
)

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
TOKENIZER_FOLDER, ACTIONS_FILE, DEFAULTS_FILE = "tokenizer", "actions.json", "generation.json"
TEXT_FOLDER = "text"
_EXPECTED = f"expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
# Suffixes of the files of a text tokenizer
_TEXT_FILES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_MISFITS = (*MISFITS, errors.StrictDataclassError)  # the last one by transformers' configs
# Limits of a YAML config: characters, and values with aliases resolved.
_MAX_YAML, _MAX_VALUES = 2**18, 2**16
# Errors of the Hub's client, and of its HTTP library if the Hub is not reachable
_HUB_ERRORS: tuple[Any, ...] = OSError, ValueError, errors.HfHubHTTPError.__bases__[0]

logger = logging.getLogger("diagd")


def load_model(
    name_or_path: str | Path,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    adapter: str | Path | None = None,
) -> Transformer:
    """Load a bundled model, a checkpoint folder, or a released checkpoint file.

    Args:
        name_or_path: A name from `available_models`, our folder, a family's checkpoint file, or the
            folder of one; or `user/name` on the Hugging Face Hub, which is downloaded unless there
            is a folder of that name.
        config: A config file to use instead of the one beside the weights; for a released
            checkpoint with its original field names.
        device: Device of the weights.
        dtype: Floating-point type to cast them to.
        adapter: Folder of an adapter of this model, merged in float32 before that.

    Raises:
        ValueError: A preset name, a dtype that is not a floating-point type, invalid JSON, a bad
            config, a damaged or mismatched weight file, or another model's adapter.
        FileNotFoundError: No such model, or a file of it is missing.
    """
    return build_model(find_model(name_or_path, config, adapter), device, dtype)


def find_model(
    name_or_path: str | Path,
    config: str | Path | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Recognise the checkpoint for `load_model`; its weights stay on disk until they are used.

    The folder of an adapter stands for its base with it.
    """
    path, base = model_path(name_or_path), base_path(name_or_path)
    if path != base and adapter is not None:
        raise ValueError(f"adapter must be left out: {path} is one of {base} itself")
    adapter, found = path if path != base else adapter, _find(base, config)
    return found if adapter is None else adapted(found, adapter)


def _find(path: Path, config: str | Path | None) -> Checkpoint:
    if kind := diffusers_pipeline(path):
        raise ValueError(
            f"{path}: a pipeline of diffusers, {kind}; of these diagd has GLM-Image's, in generate"
        )
    side = None if config is None else Path(config)
    if path.name == WEIGHTS_FILE and (side or path.with_name(CONFIG_FILE)).is_file():
        path = path.parent if _is_ours(path.parent, side) else path
    if path.is_dir() and _is_ours(path, side):
        if not any((path / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
            raise FileNotFoundError(f"{path}: no model, {_EXPECTED}, or a released checkpoint")
        own_config = read_config(side or path / CONFIG_FILE)
        weights = read_weights(path / WEIGHTS_FILE)
        return Checkpoint(OWN, path / WEIGHTS_FILE, own_config, weights, Source(weights))
    return _read_released(path, side)


def model_path(name_or_path: str | Path) -> Path:
    """Return the folder of a bundled model, an existing path, or a download (`user/name`)."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in available_models():
        return presets.ASSETS / name
    if path.exists():
        return path
    if name in PRESETS:
        raise ValueError(
            f"{name!r} is a preset without weights: use Transformer.random(PRESETS[{name!r}]), "
            "or diagd bench, which uses random weights"
        )
    if is_repository(name):
        try:
            return Path(snapshot_download(name))  # the latest, or when offline the last download
        except _HUB_ERRORS as error:
            raise FileNotFoundError(
                f"no model at {name!r}, neither a file or folder nor on the Hugging Face Hub: "
                f"{_hub_reason(error)}"
            ) from None
    raise FileNotFoundError(
        f"no model at {name!r}: {_EXPECTED}, a released checkpoint, a bundled model "
        f"({', '.join(available_models()) or 'none installed'}), or user/name on the Hugging Face "
        "Hub"
    )


def base_path(name_or_path: str | Path) -> Path:
    """Return `model_path`, or of an adapter's folder that of its base."""
    path = model_path(name_or_path)
    if not (about := path / ADAPTER_FILE).is_file():
        return path
    base = read_json_object(about).get("base")
    if not isinstance(base, str) or (Path(base) / ADAPTER_FILE).is_file():
        raise ValueError(f"{about}: expected the name of a base, got {brief(base)}")
    return model_path(base)


def contents_of(name_or_path: str | Path, adapter: Path | None = None) -> str:
    """Return the fingerprint of a model's files, and of an adapter's if one is given."""
    return "-".join(fingerprint(one) for one in (model_path(name_or_path), adapter) if one)


def diffusers_pipeline(path: Path) -> str:
    """Return the class of the pipeline of diffusers that a folder holds, "" for any other path."""
    index = path / "model_index.json"
    return str(read_json_object(index).get("_class_name")) if index.is_file() else ""


def is_repository(name: str) -> bool:
    """Return whether a name has the form `user/name` of a Hugging Face Hub repository."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def _hub_reason(error: Exception) -> str:
    if isinstance(error, errors.GatedRepoError):
        return "access must be requested on its page"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such model, or a private one (hf auth login)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the Hub cannot be reached, and the model is not in the cache"
    return str(error).strip().split("\n")[0]


def _released_files(folder: Path) -> list[Path]:
    patterns = dict.fromkeys(name for family in table.FAMILIES for name in family.files)
    return list(dict.fromkeys(file for name in patterns for file in sorted(folder.glob(name))))


def _is_ours(folder: Path, config: Path | None) -> bool:
    path = config or folder / CONFIG_FILE
    names = {file.name for file in _released_files(folder)}
    if not path.is_file() or (names and WEIGHTS_FILE not in names):
        return names <= {WEIGHTS_FILE}
    theirs = frozenset().union(*(family.config_fields for family in table.FAMILIES))
    return path.suffix == ".json" and not theirs & read_json_object(path).keys()


def _read_released(path: Path, config: Path | None) -> Checkpoint:
    known = ", ".join(family.name for family in table.FAMILIES)
    if not (files := _released_files(path) if path.is_dir() else [path]):
        raise FileNotFoundError(f"{path}: no checkpoint of {known}")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path}: several checkpoints ({names}): name one of them")
    file = files[0]
    source = _read_source(file, config)
    if {"num_heads", "grid_width"} <= source.side.keys():  # else another family would load it
        raise ValueError(f"{file}: weights beside a config of ours must be named {WEIGHTS_FILE}")
    for family in table.FAMILIES:
        is_one = any(name in source.tensors for name in family.signature) and family.fits(source)
        if is_one and family.convert:
            with naming(f"{file}: {family.name} checkpoint", _MISFITS):
                model_config, weights = family.convert(source)
            return Checkpoint(family, file, model_config, weights, source)
    shown = ", ".join(list(source.tensors)[:3]) or "no tensors"
    raise ValueError(f"{file}: expected a checkpoint of {known}, got tensors {shown}")


def _read_source(path: Path, config: Path | None) -> Source:
    beside = (path.with_name(name) for name in (CONFIG_FILE, "config.yaml", "config.yml"))
    side = config or next(filter(Path.is_file, beside), None)
    fields = _read_fields(side) if side else {}
    if path.suffix in (".safetensors", ".json"):
        tensors = read_weights(path) if path.suffix == ".safetensors" else read_shards(path)
        return Source(tensors, side=fields, path=path)
    content = read_torch_file(path)
    hyper = content.get("hyper_parameters")
    return Source(tensors_of(content), hyper if isinstance(hyper, dict) else {}, fields, path)


def read_shards(index: Path) -> dict[str, Tensor]:
    """Return the weights in the files that an index of transformers names beside it."""
    files = read_json_object(index).get("weight_map")
    names: list[Any] = list(files.values()) if isinstance(files, dict) and files else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index}: expected a weight_map that names files beside it")
    shards = [read_tensors(index.with_name(name)) for name in sorted(set(names))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def _read_fields(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return read_json_object(path)
    text = read_text(path)
    damage = ValueError, RecursionError, yaml.YAMLError  # also too long a number, too deep nesting
    with naming(f"{path}: not valid YAML", damage):
        values = _parse_yaml(text)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a YAML object, got {type(values).__name__}")
    return values


def _parse_yaml(text: str) -> Any:
    """Parse YAML like `safe_load`, with a limit on aliases."""
    if len(text) > _MAX_YAML:
        raise ValueError(f"expected at most {_MAX_YAML} characters, got {len(text)}")
    loader = yaml.SafeLoader(text)
    node, counts = loader.get_single_node(), dict[yaml.Node, float]()

    def count(node: yaml.Node) -> float:  # of values; infinite if one contains itself
        if node not in counts:
            counts[node] = math.inf
            pairs = isinstance(node, yaml.MappingNode)
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = (part for pair in parts for part in pair) if pairs else parts
            counts[node] = 1 + sum(map(count, parts))
        return counts[node]

    if node and count(node) > _MAX_VALUES:
        raise ValueError(f"aliases expand to more than {_MAX_VALUES} values")
    return loader.construct_document(node) if node else None


def read_config(path: Path) -> ModelConfig:
    values = _read_fields(path)
    with naming(path):
        return ModelConfig.from_dict(values)


def build_model(found: Checkpoint, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Build the model of a checkpoint around its weights, which must be finite."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"dtype must be a floating-point type of torch, such as torch.bfloat16, got {dtype!r}"
        )
    model = empty_model(found)
    logger.info("%s: %s", found.path, found.family.name)
    assign_weights(model, found.weights, found.path, device, dtype, found.merge)
    return model.to(device)


def empty_model(found: Checkpoint) -> Transformer:
    """Build the model of a checkpoint on the meta device, and compare it with the weights."""
    config, weights = found.config, found.weights
    numbers = sum(weight.numel() for weight in weights.values())
    parts = ("num_layers", len(weights), "tensors"), ("head_dim", numbers, "numbers")
    for name, count, what in parts:  # values that a config claims, which would cost time or memory
        if (claimed := getattr(config, name)) > count:
            raise ValueError(
                f"{found.path}: does not match the config: {name} is {claimed}, but there are "
                f"only {count} {what}"
            )
    with torch.device("meta"):
        model = Transformer(config)
    check_fit(model, weights, found.path)
    return model


def load_tokenizer(folder: str | Path, allow_torchscript: bool = False) -> VideoTokenizer:
    """Load the tokenizer of a folder, on the CPU.

    Allow TorchScript, which executes code, only if the user has named this very folder. Other
    folders have a config.json with a family's `kind`, or diffusers' `"_class_name": "VQModel"`.
    """
    folder = require_folder(folder, "tokenizer folder")
    formats = [family.tokenizer_folder for family in table.FAMILIES if family.tokenizer_folder]
    loaders = {form.kind: form.load for form in formats if form.kind}
    for form in formats:
        if any((folder / name).is_file() for name in form.torchscript):
            if not allow_torchscript:
                raise ValueError(
                    f"{folder} holds TorchScript, which executes code when loaded: "
                    "name this folder as the tokenizer if you trust it"
                )
            return form.load(folder)
    config = read_json_object(folder / CONFIG_FILE)
    kind = config.get("kind", config.get("_class_name"))
    known = {"VQModel": VQTokenizer.from_pretrained} | loaders
    if kind not in list(known):  # it may not be a string
        raise ValueError(
            f"{folder / CONFIG_FILE}: expected kind {', '.join(loaders)} or _class_name VQModel, "
            f"got {brief(kind)}"
        )
    with naming(f"{folder}: not a tokenizer of {kind}", _MISFITS):
        return known[kind](folder)


def tokenizer_of(found: Checkpoint) -> VideoTokenizer:
    """Load the tokenizer of a checkpoint; ValueError, naming the file, if it is missing."""
    tokenizer = None
    if found.family.tokenizer:
        with naming(f"{found.path}: its tokenizer", _MISFITS):
            tokenizer = found.family.tokenizer(found)
    if tokenizer is None:
        raise ValueError(f"{found.path}: tokenizer not found, give its folder as --tokenizer")
    return tokenizer


def load_text(found: Checkpoint) -> TextPrompts | None:
    """Load the converter from texts to prompts; None for a model that takes no text prompt."""
    if (folder := _text_folder(found)) is None:
        return None
    config = folder / CONFIG_FILE
    kind = read_json_object(config).get("model_type")
    forms = {kind: one.text for one in table.FAMILIES if one.text for kind in one.text.kinds}
    if kind not in list(forms):
        raise ValueError(f"{config}: expected model_type {', '.join(forms)}, got {brief(kind)}")
    require_file(folder / forms[kind].file, "text tokenizer")
    with naming(f"{folder}: not a text tokenizer of {kind}", (*_MISFITS, OSError)):
        return forms[kind].load(folder, found)


def save_text(found: Checkpoint, target: Path) -> bool:
    """Copy a text tokenizer's files to a folder of ours; return whether there are any."""
    if (folder := _text_folder(found)) is None:
        return False
    for file in sorted(folder.iterdir()):
        if file.suffix in _TEXT_FILES and not file.name.endswith(".safetensors.index.json"):
            copy_whole(file, target / TEXT_FOLDER / file.name)
    return True


def _text_folder(found: Checkpoint) -> Path | None:
    if (text := found.family.text) is not None:
        beside = found.path.parent / Path(text.encoder).name
        return require_folder(beside, f"text encoder {text.encoder}")
    folder = found.path.with_name(TEXT_FOLDER)
    return folder if found.family is OWN and folder.is_dir() else None


def read_actions_file(path: Path) -> ActionCodec:
    """Read `actions.json`: names, axes of vectors, or the family that defines the actions."""
    kind = read_json_object(path).get("kind")
    codecs = (family.actions for family in table.FAMILIES if family.name == kind)
    return next(codecs, None) or load_actions(path)


def _own_tokenizer(found: Checkpoint) -> VideoTokenizer | None:
    folder = found.path.with_name(TOKENIZER_FOLDER)
    return load_tokenizer(folder) if folder.is_dir() else None


def _own_defaults(found: Checkpoint) -> GenerationDefaults:
    path = found.path.with_name(DEFAULTS_FILE)
    fields = read_json_object(path) if path.is_file() else {}
    with naming(f"{path}: not generation defaults", (ValueError, TypeError)):
        defaults = GenerationDefaults(**fields)
    if not found.config.num_action_tokens:  # a grid may hold several frames
        return defaults
    held = min(found.config.frames_held, defaults.remember or found.config.frames_held)
    max_context = max(1, held - 1)  # leave room for one new frame
    return replace(defaults, context_frames=min(defaults.context_frames, max_context))


OWN = Family(name="diagd", tokenizer=_own_tokenizer, defaults=_own_defaults)


def save_model(
    model: Transformer, folder: str | Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors, in the model's dtype, each atomically.

    Packed models are written with their plain weights.

    Args:
        model: The result of `load_model`, or a model in training.
        folder: Target folder, created if missing; `load_model` accepts it.
        weights: The model's state dict, if gathered from several processes.
    """
    write_checkpoint(Path(folder), model.config, model.state_dict() if weights is None else weights)


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    change: Change = unchanged,
) -> None:
    """Write config and weights, in their own types; the weights last, as the mark of completion."""
    write_json(folder / CONFIG_FILE, asdict(config), indent=2)
    write_weights(folder / WEIGHTS_FILE, weights, change)


def save_tokenizer(folder: Path, tokenizer: VideoTokenizer) -> None:
    """Write a tokenizer losslessly to a folder of ours; TorchScript is rejected."""
    if (save := getattr(tokenizer, "save_pretrained", None)) is None:
        raise ValueError(f"{type(tokenizer).__name__} cannot be stored in {folder}")
    save(folder / TOKENIZER_FOLDER, torch.float32)


def write_actions_file(path: Path, codec: ActionCodec) -> None:
    kinds = [family.name for family in table.FAMILIES if family.actions == codec]
    if kinds:
        write_json(path, {"kind": kinds[0]})
    else:
        assert isinstance(codec, OwnActions)
        codec.save(path)


def write_defaults(folder: Path, defaults: GenerationDefaults) -> None:
    write_json(folder / DEFAULTS_FILE, asdict(defaults))


def upload(folder: Path, repository: str, private: bool | None, token: str | None) -> str:
    """Upload a folder to a repository on the Hub, created if missing; return its URL."""
    api = HfApi(token=token)
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="World model by diagd"
        )
    except _HUB_ERRORS as error:
        raise OSError(f"{repository} cannot be uploaded: {_hub_reason(error)}") from None
    return str(url)
