"""A family of models behind one record: all that loaders and commands know of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from diagd.data.actions import ActionCodec
from diagd.families.defaults import GenerationDefaults
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextPrompts
from diagd.tokenizers.vq import VideoTokenizer


@dataclass(frozen=True)
class Source:
    """The files of a checkpoint as read."""

    tensors: Mapping[str, Tensor]  # by the names of the file
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)  # as the file itself has them
    side: Mapping[str, Any] = field(default_factory=dict)  # of the config file given or beside it
    path: Path = Path()  # the file with the weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint recognised and not yet loaded."""

    family: "Family"
    path: Path  # the file with the weights
    config: ModelConfig
    weights: dict[str, Tensor]  # under our names, mapped into memory
    source: Source


@dataclass(frozen=True)
class TokenizerFolder:
    """A folder that holds a tokenizer in a format of a family's own."""

    load: Callable[[Path], VideoTokenizer]  # to the CPU
    kind: str | None = None  # in its config.json
    torchscript: tuple[str, ...] = ()  # files that give it away; they run code when loaded


@dataclass(frozen=True)
class TextFolder:
    """The files of a text tokenizer or encoder, beside the weights or in a folder of ours."""

    kinds: tuple[str, ...]  # `model_type` in its config.json
    load: Callable[[Path, Checkpoint], TextPrompts]
    # a model that reads texts, by its name on the Hub: in a folder beside the weights, not copied
    encoder: str = ""


@dataclass(frozen=True)
class RecordingFormat:
    """Files that hold the frames of a clip together with its actions."""

    suffix: str  # of their names, in lower case
    length: Callable[[Path], tuple[int, Fraction]]  # number of frames, frame rate; decodes nothing
    # the frames of ascending numbers, each (H_px, W_px, 3) uint8 RGB
    frames: Callable[[Path, Iterable[int]], Iterator[Tensor]]
    actions: Callable[[Path], list[str]]  # those that led to each frame (to the first: nothing)


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models."""

    name: str  # `actions.json` of a converted model names it, too
    defaults: Callable[[Checkpoint], GenerationDefaults]  # as its makers use the model
    licence: str = ""  # of what was released, as far as we know; no advice
    # the config of a released checkpoint, and the weights under our names; raises where its files
    # do not fit together; None: our own folders, which need no translation
    convert: Callable[[Source], tuple[ModelConfig, dict[str, Tensor]]] | None = None
    signature: tuple[str, ...] = ()  # names of tensors, any of which shows that a file is one
    # whether a file of this signature is one, where other families have the same signature
    fits: Callable[[Source], bool] = lambda source: True
    # glob patterns of its files, and names in its config that tell it from ours: of transformers
    files: tuple[str, ...] = ("*.index.json", "model.safetensors", "pytorch_model.bin")
    config_fields: frozenset[str] = frozenset({"model_type", "vocabulary_map"})
    # the tokenizer with a checkpoint, or None where it is not there; None: it never comes with one
    tokenizer: Callable[[Checkpoint], VideoTokenizer | None] | None = None
    tokenizer_folder: TokenizerFolder | None = None
    text: TextFolder | None = None  # of a model that makes images from texts
    actions: ActionCodec | None = None  # None: as an `actions.json` beside the weights says
    # of a family whose models have actions of their own; where there is no such file
    name_actions: Callable[[Checkpoint], ActionCodec] | None = None
    recordings: RecordingFormat | None = None
