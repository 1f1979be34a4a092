"""Train a model under the visibility of diagonal schedules: diagonal finetuning.

diagd finetune --init doom --tokens tokens/train --out doom-any
diagd finetune --init doom --tokens tokens --out doom-k1 --strategies "k=1"
"""

from typing import Any

from diagd.system import only_writer
from diagd.training.finetuning import FinetuneOptions, finetune


def main(options: FinetuneOptions) -> dict[str, Any]:
    """Finetune to the last step, and report the validation losses."""
    with only_writer(options.out):
        return finetune(options)
