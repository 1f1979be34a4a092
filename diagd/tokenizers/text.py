"""Texts as models read them: ids of transformers' tokenizers, or the states of a T5 encoder.

Cosmos pads every prompt to 512 places, sets those behind the text to zero and lets all of them be
attended to; so does this module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from diagd.files import naming, require_file, require_folder
from diagd.weight_files import read_weights

NUM_PLACES = 512
_UNREADABLE = "its text tokenizer cannot be read"  # said of `Exception`, which tokenizers raises


class TextIds(NamedTuple):
    """A text as a model of images reads it, in our order of ids: the visual ones first."""

    prompt: Tensor  # (1, P) int64, or (B, P) behind B pictures: all that stands before the image
    unconditional: Tensor  # (1, U) int64, the same of no text, for guidance
    # (P, hidden_size), of a text read by a model of its own: what the ids of `prompt` stand for
    vectors: Tensor | None = None
    # (B, S) int64, the prompt without its text where it has a picture, and the scale by which that
    # is preferred to the unconditional one
    picture: Tensor | None = None
    picture_scale: float = 1.0


class TextPrompts(Protocol):
    """Turns texts into prompts."""

    takes_pictures: bool = False  # whether a text may stand behind a picture

    def __call__(self, text: str) -> TextIds: ...

    def with_pictures(self, pictures: Tensor, text: str) -> TextIds:
        """Return the prompts of pictures (B, height, width) int64, each with the text behind it."""
        raise TypeError(f"{type(self).__name__} takes no pictures")


def encode_text(text: str, folder: str | Path) -> Tensor:
    """Encode a text as `text_states`: (1, NUM_PLACES, size) float32, zero behind the text."""
    states = text_states(text, folder, NUM_PLACES)
    return functional.pad(states, (0, 0, 0, NUM_PLACES - len(states)))[None]


@torch.inference_mode()
def text_states(text: str, folder: str | Path, max_tokens: int) -> Tensor:
    """Encode a text, cut to `max_tokens`, with the T5 of a local folder: (tokens, size) float32.

    The folder holds weights and tokenizer, as transformers saves them.
    """
    from transformers import AutoTokenizer, T5EncoderModel  # slow to import

    if not text.strip():
        raise ValueError("text must not be empty")
    folder = require_folder(folder, "text encoder folder")
    with naming(f"{folder} holds no T5 encoder", (OSError, ValueError, SafetensorError)):
        with naming(_UNREADABLE, Exception):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        encoder = T5EncoderModel.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt").input_ids
    return encoder(ids).last_hidden_state[0].float()


def read_embedding(path: str | Path) -> Tensor:
    """Read a text encoded before: a safetensors file with one tensor (places, size) or (1, ...)."""
    tensors = list(read_weights(require_file(path, "text embedding")).values())
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if len(tensors) != 1 or tensors[0].dim() < 2 or tensors[0].shape[:-2] not in ((), (1,)):
        raise ValueError(f"{path}: expected one tensor (places, size), got {shapes or 'none'}")
    return tensors[0].float().reshape(1, *tensors[0].shape[-2:])


def read_words(folder: Path) -> Any:
    """Load the tokenizer of a local folder, which must have a BOS; code in it is not run."""
    from transformers import AutoTokenizer  # slow to import

    with naming(_UNREADABLE, Exception):
        words = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if words.bos_token_id is None:
        raise ValueError("it has no token for the begin of a sequence (see tokenizer_config.json)")
    return words


def ids_of(words: Any, names: Sequence[str | None]) -> list[int]:
    """Return the ids of some tokens of a tokenizer, or raise ValueError where one is missing."""
    vocabulary = words.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"it has no token {missing[0] or 'for padding'}: is it another model's?")
    return [vocabulary[name] for name in names]
