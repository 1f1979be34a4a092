"""Turn recorded clips into all that training needs: tokens, a tokenizer, start scenes.

diagd tokenize --clips clips --out tokens
diagd tokenize --clips more_clips --tokenizer tokens/tokenizer --out more
"""

from typing import Any

from diagd.system import only_writer
from diagd.training.corpus import TokenizeOptions, tokenize


def main(options: TokenizeOptions) -> dict[str, Any]:
    """Split, train a tokenizer, store tokens; report what was measured."""
    with only_writer(options.out):
        return tokenize(options)
