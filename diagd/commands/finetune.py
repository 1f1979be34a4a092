"""Train a model under the visibility of a diagonal schedule: diagonal finetuning.

diagd finetune --init doom --tokens tokens/train --out models/doom-k1 -k 1
"""

from diagd.training.finetuning import FinetuneOptions, finetune


def main(options: FinetuneOptions) -> dict[str, float]:
    """Finetune to the last step, and report the validation losses."""
    return finetune(options)
