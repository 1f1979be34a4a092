"""Vectors of numbers as actions, such as a robot's: a token for each number.

`diagd tokenize --lerobot` records the axes of a world in its `actions.json`. An action is written
`move(0.5,-1)`, or by axes, `shoulder=0.5+elbow=min`, from rest.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagd.checks import brief
from diagd.data.actions import ActionVocabulary, action_in, parse_call
from diagd.files import naming, read_json_object, write_json

MAX_IDS = 2**15  # shards hold ids as int16
_JOIN = re.compile(r"\+(?=[^\d.+-])")  # not in 1e+05


@dataclass(frozen=True)
class VectorActions:
    """Vectors within a range for each axis, as an `ActionCodec`: a number becomes one of its bins.

    Words are `AXIS=NUMBER`, `AXIS=min` and `AXIS=max`; those for one axis add up, counted from
    rest. Numbers beyond an axis' range are clipped to it.
    """

    axes: tuple[str, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    bins: int = 64  # of each axis, at equal distances from its lowest to its highest number
    # of the action `none`; default: zeros, or what is nearest to them
    rest: tuple[float, ...] = field(default=(), compare=False)

    combines = True

    def __post_init__(self) -> None:
        count, given = len(self.axes), (self.lowest, self.highest, self.rest or self.lowest)
        if not count or len(set(self.axes)) != count:
            raise ValueError(
                f"axes must be distinct and not empty, got {count}: {brief(self.axes)}"
            )
        for name in self.axes:
            if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w.-]*", name):
                raise ValueError(
                    f"names of axes must be letters, digits, and any of _.- after a letter, "
                    f"got {brief(name)}"
                )
        numbers = [n for one in given for n in one if isinstance(n, int | float)]
        if len(numbers) != 3 * count or not all(map(math.isfinite, numbers)):
            raise ValueError(f"lowest, highest and rest must be {count} finite numbers, as axes")
        for (name, low, high), rest in zip(self.ranges, self.resting, strict=True):
            if not low <= rest <= high:
                raise ValueError(
                    f"{name}: expected lowest <= rest <= highest, got {low}, {rest}, {high}"
                )
        if not 2 <= self.bins <= MAX_IDS // count:
            expected = f"in [2, {MAX_IDS // count}] for {count} axes"
            raise ValueError(f"bins must be {expected}, got {self.bins}")

    @property
    def resting(self) -> tuple[float, ...]:
        ends = zip(self.lowest, self.highest, strict=False)
        return self.rest or tuple(min(max(0.0, low), high) for low, high in ends)

    @property
    def names(self) -> tuple[str, ...]:
        return ("none", *(f"{axis}={end}" for axis in self.axes for end in ("min", "max")))

    @property
    def num_tokens(self) -> int:
        return len(self.axes)

    @property
    def ranges(self) -> list[tuple[str, float, float]]:
        """The name of each axis with its lowest and highest number."""
        return list(zip(self.axes, self.lowest, self.highest, strict=True))

    @property
    def num_ids(self) -> int:
        return len(self.axes) * self.bins

    def numbers_of(self, action: str) -> NDArray[np.float64]:
        """Return the numbers (axes,) of an action, maybe beyond their ranges."""
        rest = np.array(self.resting)
        if (called := parse_call(action, "move", len(self.axes))) is not None:
            return np.array(called)
        numbers = rest.copy()
        for word in (part.strip() for part in _JOIN.split(action)):
            name, _, value = word.partition("=")
            if word == "none":
                continue
            if name not in self.axes or (number := self._number(name, value)) is None:
                raise ValueError(
                    f"unknown action {brief(word)}, expected none or move({','.join(self.axes)}) "
                    f"or words joined by + such as {self.axes[0]}=0.5 and {self.axes[-1]}=max"
                )
            place = self.axes.index(name)
            numbers[place] += number - rest[place]
        return numbers

    def _number(self, axis: str, value: str) -> float | None:
        place = self.axes.index(axis)
        ends = {"min": self.lowest[place], "max": self.highest[place]}
        try:
            number = ends[value] if value in ends else float(value)
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the local ids: one for each axis, which has ids of its own."""
        shares = self.shares_of(action)
        ids = np.rint(shares * (self.bins - 1)) + np.arange(len(self.axes)) * self.bins
        return tuple(ids.astype(int).tolist())

    def shares_of(self, action: str) -> NDArray[np.float64]:
        """Return where the numbers (axes,) of an action are in their ranges, clipped to [0, 1]."""
        lowest, spans = np.array(self.lowest), np.subtract(self.highest, self.lowest)
        shares = (self.numbers_of(action) - lowest) / np.where(spans > 0, spans, np.inf)
        return shares.clip(0, 1)

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": WORDS, a list of all numbers, or {AXIS: NUMBER}}`."""
        action = record.get("action")
        if isinstance(action, Mapping):
            record = {"action": "+".join(f"{axis}={value}" for axis, value in action.items())}
        elif isinstance(action, list):
            record = {"action": f"move({','.join(map(str, action))})"}
        return action_in(record, self, f"WORDS or {len(self.axes)} NUMBERS")

    def nearest_name(self, action: str) -> str:
        """Return the name of the axis that is farthest from rest, if by a quarter of its range."""
        shift = self.shares_of(action) - self.shares_of("none")
        place = int(abs(shift).argmax())
        is_far = abs(shift[place]) > 1 / 4
        return self.names[1 + 2 * place + int(shift[place] > 0)] if is_far else "none"

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "VectorActions":
        """Parse the fields of `actions.json`, or raise ValueError."""
        with naming("not axes of vectors", (ValueError, TypeError)):
            given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            return cls(**given)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self) | {"rest": self.resting})


def spell(numbers: Iterable[float]) -> str:
    """Spell all numbers of a vector as an action."""
    return f"move({','.join(f'{number:.6g}' for number in numbers)})"


OwnActions = ActionVocabulary | VectorActions  # of worlds that diagd trains


def load_actions(path: Path) -> OwnActions:
    """Read a checkpoint's `actions.json`: names, or axes of vectors."""
    if "axes" not in (fields := read_json_object(path)):
        return ActionVocabulary.load(path)
    with naming(path):
        return VectorActions.parse(fields)
