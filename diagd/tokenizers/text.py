"""Text inputs of models: ids of transformers' tokenizers, or the states of a T5 encoder.

Cosmos pads every prompt to 512 positions, sets those after the text to zero and attends to all of
them; so does this module.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from diagd.files import naming, read_json_object, read_lines, require_file, require_folder
from diagd.weight_files import read_weights

NUM_PLACES = 512
_UNREADABLE = "text tokenizer cannot be loaded"  # said of `Exception`, which tokenizers raises


class TextIds(NamedTuple):
    """A text as input of an image model, in our order of ids: the visual ones first."""

    prompt: Tensor  # (1, P) int64, or (B, P) after B pictures: everything before the image
    unconditional: Tensor  # (1, U) int64, the same without text, for guidance
    # (P, hidden_size), for a text with its own encoder: embeddings of the ids of `prompt`
    vectors: Tensor | None = None
    # (B, S) int64, the prompt without its text if it has a picture, and its guidance scale over the
    # unconditional prompt
    picture: Tensor | None = None
    picture_scale: float = 1.0


class TextPrompts(Protocol):
    """Convert texts to prompts."""

    takes_pictures: bool = False  # whether a text may follow a picture

    def __call__(self, text: str) -> TextIds: ...

    def with_pictures(self, pictures: Tensor, text: str) -> TextIds:
        """Return the prompts of pictures (B, height, width) int64, each followed by the text."""
        raise TypeError(f"{type(self).__name__} takes no pictures")


def encode_text(text: str, folder: str | Path) -> Tensor:
    """Encode a text as `text_states`: (1, NUM_PLACES, size) float32, zero after the text."""
    states = text_states(text, folder, NUM_PLACES)
    return functional.pad(states, (0, 0, 0, NUM_PLACES - len(states)))[None]


@torch.inference_mode()
def text_states(text: str, folder: str | Path, max_tokens: int) -> Tensor:
    """Encode a text and its end token, at most `max_tokens`, by a T5: (tokens, size) float32.

    The folder holds weights and tokenizer, as saved by transformers.
    """
    from transformers import T5EncoderModel  # slow to import

    if not text.strip():
        raise ValueError("text must not be empty")
    folder = require_folder(folder, "text encoder folder")
    with naming(f"{folder}: not a T5 encoder", (OSError, ValueError, SafetensorError)):
        words = load_words(folder)
        encoder = T5EncoderModel.from_pretrained(folder, local_files_only=True)
        end = encoder.config.eos_token_id
        _check_ids(words, {words.eos_token: end})
    ids = words(text, add_special_tokens=False).input_ids[: max_tokens - 1]
    return encoder(torch.tensor([[*ids, end]])).last_hidden_state[0].float()


def read_embedding(path: str | Path) -> Tensor:
    """Load an encoded text: a safetensors file with one tensor (places, size) or (1, ...)."""
    tensors = list(read_weights(require_file(path, "text embedding")).values())
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if len(tensors) != 1 or tensors[0].dim() < 2 or tensors[0].shape[:-2] not in ((), (1,)):
        raise ValueError(f"{path}: expected one tensor (places, size), got {shapes or 'none'}")
    return tensors[0].float().reshape(1, *tensors[0].shape[-2:])


def read_words(folder: Path, side: Mapping[str, Any] | None = None) -> Any:
    """Load the tokenizer of a local folder, which must have a BOS and match the model's ids.

    The ids are those in the model's config.json: `side`, or else the one in the folder, if any.
    """
    words, config = load_words(folder), folder / "config.json"
    if words.bos_token_id is None:
        raise ValueError("the tokenizer has no BOS token (see tokenizer_config.json)")
    if side is None:
        side = read_json_object(config) if config.is_file() else {}
    begin = (side.get("text_config") or {}).get("bos_token_id")
    _check_ids(words, {words.bos_token: begin} | (side.get("vocabulary_map") or {}))
    return words


def load_words(folder: Path) -> Any:
    """Load a folder's tokenizer.json unchanged, running no code of the folder.

    AutoTokenizer would rebuild it for the class named in tokenizer_config.json, differently in each
    version of transformers: spaces and BOS were lost.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import

    require_file(folder / "tokenizer.json", "text tokenizer")
    with naming(_UNREADABLE, Exception):
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def read_ranks(path: Path, num_words: int, names: Sequence[str]) -> Any:
    """Build the tokenizer of a file, a token in base64 and its number a line, and of names behind.

    A pair of tokens merges if the whole is a token as well, the one with the lowest number first.
    """
    from transformers import Qwen2Tokenizer  # slow to import
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters, vocabulary = bytes_to_unicode(), dict[str, int]()
    for line in filter(None, read_lines(path, "text tokenizer")):
        token, rank = line.split()
        vocabulary["".join(letters[byte] for byte in b64decode(token))] = int(rank)
    if sorted(vocabulary.values()) != list(range(num_words)):
        got = f"{len(vocabulary)} tokens (of another model?)"
        raise ValueError(f"{path.name} must hold tokens 0 to {num_words - 1}, got {got}")
    merges = [
        (whole[:cut], whole[cut:])
        for whole in sorted(vocabulary, key=lambda one: vocabulary[one])
        for cut in range(1, len(whole))
        if whole[:cut] in vocabulary and whole[cut:] in vocabulary
    ]
    words = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    words.add_tokens(list(names), special_tokens=True)
    return words


def _check_ids(words: Any, known: Mapping[Any, Any]) -> None:
    vocabulary = words.get_vocab()
    for name, theirs in known.items():
        if theirs is not None and (number := vocabulary.get(name, theirs)) != theirs:
            raise ValueError(
                f"{name!r} is {theirs} in the model's config.json but {number} in its text "
                "tokenizer: they belong to different models"
            )


def text_ids(words: Any, text: str) -> list[int]:
    """Return BOS and the ids of a text; a BOS in the text is not repeated."""
    ids = words(text, add_special_tokens=False).input_ids
    return ids if ids[:1] == [words.bos_token_id] else [words.bos_token_id, *ids]


def ids_of(words: Any, names: Sequence[str | None]) -> list[int]:
    """Return the ids of some tokens of a tokenizer; ValueError if one is missing."""
    vocabulary = words.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"tokenizer has no {missing[0] or 'padding'} token (of another model?)")
    return [vocabulary[name] for name in names]
