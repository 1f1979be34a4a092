"""Train a frame tokenizer on video clips, and turn clips into token shards.

diagd tokenize --clips gameplay --out tokenizer --shards tokens
diagd tokenize --clips heldout --tokenizer tokenizer --shards tokens_heldout
"""

from contextlib import ExitStack
from typing import Any

from diagd.system import only_writer
from diagd.tokenizers.training import TokenizeOptions, tokenize


def main(options: TokenizeOptions) -> dict[str, Any]:
    """Train, measure and store tokens, each if asked; report what was measured."""
    with ExitStack() as locks:
        for folder in filter(None, {options.out, options.shards}):
            locks.enter_context(only_writer(folder))
        return tokenize(options)
