"""The idea of a strategy: a value that names how to decode, with one spelling and a promise.

`table.py` has all of them. Nothing here knows PyTorch, so commands refuse mistakes at once.
"""

import re
from abc import ABC
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from diagd.checks import check_at_least
from diagd.decoding.schedule import TokenGrid

# What is written is raster's tokens, or others of raster's distribution, or neither.
Promise = Literal["tokens", "distribution", "no"]
_PATTERNS: dict[Any, tuple[str, type]] = {
    int: (r"\d+", int),
    int | None: (r"\d+", int),
    float: (r"\d+(?:\.\d+)?", float),
}


class Conditions(NamedTuple):
    """Where a strategy is to decode."""

    temperature: float  # 0 is greedy
    grid: TokenGrid | None = None  # of the frames; None where it is not known yet
    batch_size: int = 1
    replays: bool = False  # steps are compiled or captured


class Spelled(NamedTuple):
    """Prefix of a field's value in the name; a default value is left out with it."""

    prefix: str


@dataclass(frozen=True)
class Strategy(ABC):
    """A choice of lanes, step by step, and of what becomes final.

    It is a frozen dataclass; fields that are `Spelled` make its name.
    """

    word: ClassVar[str]  # that its name begins with
    examples: ClassVar[tuple[str, ...]] = ()  # names, for help and errors
    has_schedule: ClassVar[bool] = False  # all lanes are known before the first step
    # draws depend on what earlier steps left outside of the stream, which no compiled step sees
    remembers: ClassVar[bool] = False
    promise: ClassVar[Promise] = "no"  # compared with raster order under the same seed

    @property
    def name(self) -> str:
        """The one spelling; `parse_strategy` reads it back."""
        text = self.word
        for one, prefix, _ in _spelled(type(self)):
            value = getattr(self, one.name)
            if value != one.default:
                if isinstance(value, float):
                    value = f"{Decimal(repr(value)):f}".removesuffix(".0")
                text += f"{prefix}{value}"
        return text

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, text: str) -> "Strategy | None":
        """Return the strategy of a name, or None where the name is none of its names."""
        pattern, kinds = re.escape(cls.word), dict[str, type]()
        for one, prefix, kind in _spelled(cls):
            value, kinds[one.name] = _PATTERNS.get(kind, (r"\w*", str))
            optional = "" if one.default is MISSING else "?"
            pattern += f"({prefix}(?P<{one.name}>{value})){optional}"
        match = re.fullmatch(pattern, text, flags=re.ASCII)
        if match is None:
            return None
        given = {name: value for name, value in match.groupdict().items() if value is not None}
        return cls(**{name: kinds[name](value) for name, value in given.items()})

    def schedule(self, grid: TokenGrid) -> Any:
        """Return the schedule of a grid, a `DiagonalSchedule` or another `Order`.

        Raises:
            ValueError: lags that do not fit the grid, or a strategy without a schedule.
        """
        raise ValueError(f"{self} chooses its lanes on the way: it has no schedule")

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError where it cannot decode so."""
        if conditions.replays and self.remembers:
            raise ValueError(
                f"{self} needs backend eager or native: its steps go by what earlier ones drew from"
            )


def _spelled(kind: type[Strategy]) -> Iterator[tuple[Field[Any], str, Any]]:
    for one in fields(kind):
        inner, *notes = get_args(one.type) if get_origin(one.type) is not None else (one.type,)
        for note in notes:
            if isinstance(note, Spelled):
                yield one, note.prefix, inner


class Scheduled(Strategy):
    """A strategy that follows a schedule; `lags` are its fields that are lags."""

    has_schedule = True
    lags: ClassVar[tuple[str, ...]] = ()

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError for lags that do not fit the grid, or fit none where it is unknown."""
        if conditions.grid is not None:
            self.schedule(conditions.grid)
        check_at_least(self, **dict.fromkeys(self.lags, 1))
