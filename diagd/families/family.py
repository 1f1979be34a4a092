"""A family of models as one record: all that loaders and commands know about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from diagd.data.actions import ActionCodec
from diagd.families.defaults import GenerationDefaults
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextPrompts
from diagd.tokenizers.vq import VideoTokenizer
from diagd.weight_files import Change, unchanged


@dataclass(frozen=True)
class Source:
    """The files of a checkpoint as loaded."""

    tensors: Mapping[str, Tensor]  # by the file's names
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)  # stored in the file itself
    side: Mapping[str, Any] = field(default_factory=dict)  # of the config file, given or beside it
    path: Path = Path()  # the file with the weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is recognised but not loaded."""

    family: "Family"
    path: Path  # the file with the weights
    config: ModelConfig
    weights: dict[str, Tensor]  # under our names, memory-mapped
    source: Source
    # an adapter's change of a weight, by its name, in float32; and its strategy
    merge: Change = unchanged
    decoding: str | None = None

    @property
    def defaults(self) -> GenerationDefaults:
        defaults = self.family.defaults(self)
        return replace(defaults, decoding=self.decoding) if self.decoding else defaults


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer folder in a family's own format."""

    load: Callable[[Path], VideoTokenizer]  # loads to the CPU
    kind: str | None = None  # in its config.json
    torchscript: tuple[str, ...] = ()  # files that identify it; they execute code when loaded


@dataclass(frozen=True)
class TextFolder:
    """The files of a text tokenizer or encoder, beside the weights or in a folder of ours."""

    kinds: tuple[str, ...]  # `model_type` in its config.json
    load: Callable[[Path, Checkpoint], TextPrompts]
    file: str = "tokenizer.json"  # must be there
    # a separate text encoder, by its name on the Hub: a folder beside the weights, not copied
    encoder: str = ""


@dataclass(frozen=True)
class HandOver:
    """Contents of what a second stage, which paints the picture, is given by a first one."""

    their_ids: Tensor  # (num_embeddings,) int64, the makers' id of each of ours
    end: int  # our id of the image end, which stands behind the last row
    layers: tuple[int, ...]  # whose hidden states it reads the mean of (`hidden_states`)
    side_px: int  # pixels of a token's side


@dataclass(frozen=True)
class RecordingFormat:
    """Files that hold the frames of a clip together with its actions."""

    suffix: str  # lower case
    length: Callable[[Path], tuple[int, Fraction]]  # number of frames, frame rate; decodes nothing
    # frames by ascending numbers, each (H_px, W_px, 3) uint8 RGB
    frames: Callable[[Path, Iterable[int]], Iterator[Tensor]]
    actions: Callable[[Path], list[str]]  # the action that led to each frame (first: ignored)


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models."""

    name: str  # also used in `actions.json` of a converted model
    defaults: Callable[[Checkpoint], GenerationDefaults]  # settings of the model's authors
    licence: str = ""  # licence of the release, as far as we know; not legal advice
    # config of a released checkpoint, and weights under our names; raises if its files do not
    # match; None: our own folders, which need no translation
    convert: Callable[[Source], tuple[ModelConfig, dict[str, Tensor]]] | None = None
    signature: tuple[str, ...] = ()  # tensor names, any of which identifies the family
    # whether a file with this signature is of the family, if others share the signature
    fits: Callable[[Source], bool] = lambda source: True
    # glob patterns of its files, and names in its config that tell it from ours: of transformers
    files: tuple[str, ...] = ("*.index.json", "model.safetensors", "pytorch_model.bin")
    config_fields: frozenset[str] = frozenset({"model_type", "vocabulary_map"})
    # the tokenizer of a checkpoint, or None if missing; None: never part of a checkpoint
    tokenizer: Callable[[Checkpoint], VideoTokenizer | None] | None = None
    tokenizer_folder: TokenizerFolder | None = None
    text: TextFolder | None = None  # of a text-to-image model
    # of a model whose tokens another model paints: it has no tokenizer, and rows end in a separator
    hand_over: Callable[[Checkpoint], HandOver] | None = None
    actions: ActionCodec | None = None  # None: by an `actions.json` beside the weights
    # actions of a family's checkpoint, if there is no such file
    name_actions: Callable[[Checkpoint], ActionCodec] | None = None
    recordings: RecordingFormat | None = None
