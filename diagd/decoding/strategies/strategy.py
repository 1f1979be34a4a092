"""How to decode is a value: a strategy, with one spelling and a promise.

A strategy is a frozen dataclass. Fields that are `Spelled` make its name, such as
`k=2,d=28/predecessor`:

    @dataclass(frozen=True)
    class Diagonal(Strategy):
        word = "k"
        row_lag: Annotated[int, Spelled("=")]
        frame_lag: Annotated[int | None, Spelled(",d=")] = None
        row_start: Annotated[RowStart, Spelled("/")] = "temporal"

`diagd.decoding.strategies.table` lists all of them and reads names; `decode` has them write frames.
What is said here is known before PyTorch is imported, so commands refuse mistakes at once.
"""

import re
from abc import ABC
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from diagd.decoding.schedule import TokenGrid

# What is written is raster's tokens, or others of raster's distribution, or neither.
Promise = Literal["tokens", "distribution", "no"]
_PATTERNS: dict[Any, tuple[str, type]] = {
    int: (r"\d+", int),
    int | None: (r"\d+", int),
    float: (r"\d+(?:\.\d+)?", float),
}


class Conditions(NamedTuple):
    """Where a strategy is to decode.

    Attributes:
        temperature: 0 is greedy.
        grid: of the frames; None where it is not known yet.
        batch_size: videos decoded side by side.
        replays: whether the runner compiles or captures steps.
    """

    temperature: float
    grid: TokenGrid | None = None
    batch_size: int = 1
    replays: bool = False


class Spelled(NamedTuple):
    """What stands before a field's value in the name; a default value is left out with it."""

    prefix: str


@dataclass(frozen=True)
class Strategy(ABC):
    """How lanes are chosen, step by step, and what of it becomes final.

    Attributes:
        word: what its name begins with.
        remembers: whether what it draws follows from what earlier steps left outside of the stream,
            which a compiled or captured step would not see.
    """

    word: ClassVar[str]
    remembers: ClassVar[bool] = False

    @property
    def promise(self) -> Promise:
        """What is written, compared with raster order under the same seed."""
        return "no"

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
        """Return the name."""
        return self.name

    @classmethod
    def read(cls, text: str) -> "Strategy | None":
        """Return the strategy of a name, or None where the name is none of its names.

        Raises:
            ValueError: a value that it cannot have.
        """
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

    def check(self, conditions: Conditions) -> None:
        """Raise ValueError where it cannot decode so."""
        if conditions.replays and self.remembers:
            raise ValueError(
                f"{self} needs backend eager or native: its steps go by what earlier ones drew from"
            )


def check_least(strategy: Any, **least: int) -> None:
    """Raise ValueError where a number of a strategy is given and below the least it may be."""
    for name, bound in least.items():
        value = getattr(strategy, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def _spelled(kind: type[Strategy]) -> Iterator[tuple[Field[Any], str, Any]]:
    """Yield the fields of the name, what stands before each, and its type."""
    for one in fields(kind):
        inner, *notes = get_args(one.type) if get_origin(one.type) is not None else (one.type,)
        for note in notes:
            if isinstance(note, Spelled):
                yield one, note.prefix, inner
