"""Text tokenizers of transformers, from the files beside a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_words(folder: Path) -> Any:
    """Load the tokenizer of a local folder, which must have a BOS; code in it is not run."""
    from transformers import AutoTokenizer  # slow to import

    words = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if words.bos_token_id is None:
        raise ValueError("it has no token for the begin of a sequence (see tokenizer_config.json)")
    return words


def ids_of(words: Any, names: Sequence[str | None]) -> list[int]:
    """Return the ids of some tokens of a tokenizer, or raise ValueError where one is missing."""
    vocabulary = words.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"it has no token {missing[0] or 'for padding'}: is it another model's?")
    return [vocabulary[name] for name in names]


def check_known(words: Any, ids: Sequence[int], known: Mapping[str, int]) -> None:
    """Raise ValueError where a tokenizer has other ids of tokens than are `known` of the model."""
    for name, number in zip(words.convert_ids_to_tokens(ids), ids, strict=True):
        if (theirs := known.get(name, number)) != number:
            raise ValueError(
                f"{name!r} is {theirs} in the model's config.json and {number} in its text "
                "tokenizer, which is another model's"
            )
