"""Train a world model on token shards: next-token prediction over interleaved frames and actions.

diagd train --tokens tokens/train --validation tokens/heldout --out models/doom
"""

from diagd.system import only_writer
from diagd.training.pretraining import TrainOptions, pretrain


def main(options: TrainOptions) -> dict[str, float]:
    """Train to the last step, and report the validation loss."""
    with only_writer(options.out):
        return pretrain(options)
