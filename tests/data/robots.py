"""A tiny LeRobot dataset: two cameras, and vectors that count frames."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.robot_data import ACTION, STATE, write_dataset
from tests.tokenizers.rectangles import rectangles

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = 7, 5, 6
NAMES = {ACTION: {"motors": ["shoulder.pos", "elbow.pos", "grip"]}, STATE: None}


def write_robot(
    folder: Path, version: str = "v3.0", fps: int = 10, lengths: Sequence[int] = LENGTHS
) -> list[dict[str, NDArray[Any]]]:
    """Write episodes of rectangles, whose vectors count frames; return them."""
    episodes = []
    for number, length in enumerate(lengths):
        count = np.arange(length, dtype=np.float32)[:, None] + 10 * number
        episodes.append(
            {
                TOP: rectangles(length, seed=number).numpy(),
                WRIST: rectangles(length, seed=50 + number, size=(16, 24)).numpy(),
                ACTION: count * np.array([1, -1, 0], np.float32),
                STATE: count * np.array([0.5, 0.25], np.float32),
            }
        )
    write_dataset(folder, episodes, fps, version, NAMES)
    return episodes
