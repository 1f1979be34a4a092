"""Text tokenizers of transformers, from the files beside a model."""

from pathlib import Path
from typing import Any


def read_words(folder: Path) -> Any:
    """Load the tokenizer of a local folder; code in it is not run."""
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
