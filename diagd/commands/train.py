"""Train a world model on token shards, in raster order or under a mixture of schedules.

diagd train --tokens tokens --out world --minutes 20
diagd train --tokens tokens/train --validation tokens/heldout --out world
"""

from typing import Any

from diagd.system import only_writer
from diagd.training.pretraining import TrainOptions, pretrain


def main(options: TrainOptions) -> dict[str, Any]:
    """Train to the last step, and report the validation loss."""
    with only_writer(options.out):
        return pretrain(options)
