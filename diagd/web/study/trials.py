"""What one rater gets to see: in which order, and who stands left.

Order and sides are drawn from a seed, so they can be drawn again; the ids under which videos are
fetched are random, and say nothing.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A pair as one rater sees it.

    Attributes:
        comparison: index into the study's comparisons.
        first_is_left: whether the comparison's first system is the video on the left.
        left_id, right_id: under what the videos are fetched.
        answers: question -> one of `CHOICES`, as far as given.
    """

    number: int
    comparison: int
    clip: str
    first_is_left: bool
    left_id: str
    right_id: str
    answers: dict[str, str]


def draw_trials(clips: Sequence[str], num_comparisons: int, seed: str) -> list[Trial]:
    """Draw a rater's order of pairs and sides; each system stands left as often as right."""
    draw = random.Random(seed)
    drawn = []
    for comparison in range(num_comparisons):
        sides = [True, False] * ((len(clips) + 1) // 2)
        draw.shuffle(sides)
        drawn += [(comparison, clip, side) for clip, side in zip(clips, sides, strict=False)]
    draw.shuffle(drawn)
    return [
        Trial(number, pair, clip, side, secrets.token_urlsafe(12), secrets.token_urlsafe(12), {})
        for number, (pair, clip, side) in enumerate(drawn)
    ]
