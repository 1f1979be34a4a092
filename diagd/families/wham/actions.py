"""WHAM's actions: twelve gamepad buttons and four stick axes, a token each.

Which button is which, and the order of the axes, is not published: words number them from 1,
`button1+stick2=7`. A stick axis is one of eleven bins, 5 is at rest.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from diagd.data.actions import action_in

NUM_BUTTONS, NUM_STICKS, NUM_BINS = 12, 4, 11
NEUTRAL = NUM_BINS // 2
_REST = {f"button{number + 1}": 0 for number in range(NUM_BUTTONS)}
_REST |= {f"stick{number + 1}": NEUTRAL for number in range(NUM_STICKS)}
_COUNTS = (2,) * NUM_BUTTONS + (NUM_BINS,) * NUM_STICKS  # values of each token of an action
FIRST_IDS = tuple(itertools.accumulate(_COUNTS[:-1], initial=0))  # local id of the value 0
_BINS = {str(number): number for number in range(NUM_BINS)} | {"min": 0, "max": NUM_BINS - 1}


@dataclass(frozen=True)
class WHAMActions:
    """WHAM's actions as an `ActionCodec`.

    Words are `button1` to `button12`, `stick1=0` to `stick4=10` (bins, also `min` and `max`) and
    `none`. Words for one axis add up, counted from rest, so that opposite keys cancel each other.
    """

    names = (
        *("none", *(name for name in _REST if name.startswith("button"))),
        *(f"{name}={end}" for name in _REST if name.startswith("stick") for end in ("min", "max")),
    )
    num_tokens = NUM_BUTTONS + NUM_STICKS
    num_ids = sum(_COUNTS)
    combines = True

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the local ids: one a button, then one a stick axis."""
        values = dict(_REST)
        for word in (part.strip() for part in action.split("+")):
            name, _, bin_name = word.partition("=")
            if word.startswith("button") and word in values:
                values[word] = 1
            elif name.startswith("stick") and name in values and bin_name in _BINS:
                values[name] += _BINS[bin_name] - NEUTRAL
            elif word != "none":
                raise ValueError(
                    f"unknown action {word!r}, expected words joined by + of: none, "
                    f"button1 to button{NUM_BUTTONS}, stick1=BIN to stick{NUM_STICKS}=BIN "
                    f"with BIN 0 to {NUM_BINS - 1}, min or max"
                )
        limits = zip(FIRST_IDS, values.values(), _COUNTS, strict=True)
        return tuple(first + min(max(value, 0), count - 1) for first, value, count in limits)

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": WORDS or a row of numbers}` or `{"buttons": [...], "sticks": [...]}`."""
        action, buttons, sticks = (record.get(name) for name in ("action", "buttons", "sticks"))
        if isinstance(action, str):
            return action_in(record, self, "WORDS")
        if isinstance(buttons, list) and isinstance(sticks, list):
            if (len(buttons), len(sticks)) != (NUM_BUTTONS, NUM_STICKS):
                raise ValueError(
                    f"expected {NUM_BUTTONS} buttons and {NUM_STICKS} sticks, "
                    f"got {len(buttons)} and {len(sticks)}"
                )
            action = buttons + sticks
        if not isinstance(action, list) or not all(isinstance(v, int | float) for v in action):
            raise ValueError(
                f'expected {{"action": WORDS}}, {{"action": [{self.num_tokens} NUMBERS]}} or '
                f'{{"buttons": [...], "sticks": [...]}}, got {json.dumps(record)[:60]}'
            )
        return actions_of_rows([action])[0]


def actions_of_rows(rows: ArrayLike) -> list[str]:
    """Return the words of (T, 16) numbers: buttons, 0 or 1, then stick axes, bins 0 to 10."""
    values = np.asarray(rows)
    width = WHAMActions.num_tokens
    if values.ndim != 2 or values.shape[1] != width or values.dtype.kind not in "biuf":
        raise ValueError(f"actions must be (T, {width}) numbers, got {values.dtype} {values.shape}")
    counts = np.asarray(_COUNTS)
    wrong = np.argwhere(~((values >= 0) & (values < counts) & (values == np.floor(values))))
    if len(wrong):
        row, place = wrong[0]
        raise ValueError(
            f"action {row}: {list(_REST)[place]} must be a whole number from 0 to "
            f"{counts[place] - 1}, got {values[row, place]}"
        )
    return [_words(row) for row in values.astype(np.int64).tolist()]


def _words(values: Sequence[int]) -> str:
    axes = zip(_REST.items(), values, strict=True)
    words = [f"{name}={at}" if rest else name for (name, rest), at in axes if at != rest]
    return "+".join(words) or "none"
