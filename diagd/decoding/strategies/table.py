"""All strategies, and their names.

    raster                            next-token prediction
    k=2  k=1,d=14  k=1/predecessor    diagonals: row_lag, frame_lag (frames overlap), row start
    zipar=4                           ZipAR with this window
    exact  exact,lanes=32             raster's tokens in fewer steps, of this many lanes
    jacobi  jacobi,lanes=96           the same without drafting ahead

Without lanes, `exact` and `jacobi` measure the cost of steps; their tokens do not depend on it. A
new strategy is a class here and a line in `STRATEGIES`; one without a schedule also has a decoder
(`generate_tokens.py`). No PyTorch here, so commands report mistakes immediately.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from diagd.checks import brief, check_at_least
from diagd.decoding.schedule import DiagonalSchedule, RowStart, TokenGrid, check_row_start

Promise = Literal["tokens", "no"]  # whether the written tokens are raster's
_NUMBERS: dict[Any, tuple[str, type]] = {
    int: (r"\d+", int),
    int | None: (r"\d+", int),
}


@dataclass(frozen=True)
class Strategy:
    """A choice of lanes, step by step, and of the tokens that become final.

    A strategy is a frozen dataclass whose fields form its name: each is annotated with the text
    before its value, and left out if it has its default.
    """

    word: ClassVar[str]  # beginning of its name
    examples: ClassVar[tuple[str, ...]] = ()  # names, for help and errors
    has_schedule: ClassVar[bool] = False  # all lanes are known before the first step
    promise: ClassVar[Promise] = "no"  # compared with raster order under the same seed

    @property
    def name(self) -> str:
        text = self.word
        for one, prefix, _ in _spelled(type(self)):
            if (value := getattr(self, one.name)) != one.default:
                text += f"{prefix}{value}"
        return text

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, text: str) -> "Strategy | None":
        """Return the strategy of a name, or None if the name belongs to another class."""
        pattern, kinds = re.escape(cls.word), dict[str, type]()
        for one, prefix, kind in _spelled(cls):
            value, kinds[one.name] = _NUMBERS.get(kind, (r"\w*", str))
            optional = "" if one.default is MISSING else "?"
            pattern += f"({prefix}(?P<{one.name}>{value})){optional}"
        if (match := re.fullmatch(pattern, text, flags=re.ASCII)) is None:
            return None
        given = {name: value for name, value in match.groupdict().items() if value is not None}
        return cls(**{name: kinds[name](value) for name, value in given.items()})

    def schedule(self, grid: TokenGrid) -> Any:
        """Return the schedule of a grid, a `DiagonalSchedule` or another `Order`."""
        raise ValueError(f"strategy {self} has no schedule: it chooses lanes while decoding")

    def check(self, grid: TokenGrid | None = None) -> None:
        """Raise ValueError if it cannot decode frames of a grid, or of any grid if None."""


def _spelled(kind: type[Strategy]) -> Iterator[tuple[Field[Any], str, Any]]:
    """Yield the fields that form a name, the text before each, and its type."""
    for one in fields(kind):
        for prefix in getattr(one.type, "__metadata__", ()):
            yield one, prefix, get_args(one.type)[0]


class Scheduled(Strategy):
    """A strategy that follows a schedule; the numbers among its fields are lags."""

    has_schedule = True

    def check(self, grid: TokenGrid | None = None) -> None:
        """Raise ValueError for lags that do not fit the grid, or any grid if it is unknown."""
        if grid is not None:
            self.schedule(grid)
        lags = [one.name for one, _, kind in _spelled(type(self)) if kind in _NUMBERS]
        check_at_least(self, **dict.fromkeys(lags, 1))


@dataclass(frozen=True)
class Diagonal(Scheduled):
    """Diagonal decoding: token (t, i, j) is written at step t * frame_lag + i * row_lag + j.

    Names are `k=2`, `k=1,d=14` or `k=1/predecessor` (arXiv:2503.14070, section 3.2).

    row_lag, frame_lag and row_start are those of `DiagonalSchedule`; lags are validated once the
    frames are known.
    """

    word, examples = "k", ("k=2", "k=1,d=14", "k=1/predecessor")
    row_lag: Annotated[int, "="]
    frame_lag: Annotated[int | None, ",d="] = None
    row_start: Annotated[RowStart, "/"] = "temporal"

    def __post_init__(self) -> None:
        check_row_start(self.row_start)

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        return DiagonalSchedule(grid, self.row_lag, self.frame_lag, self.row_start)


@dataclass(frozen=True)
class Raster(Scheduled):
    """Next-token prediction: one token per step."""

    word, examples = "raster", ("raster",)
    promise = "tokens"

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        return DiagonalSchedule.raster(grid)


@dataclass(frozen=True)
class ZipAR(Scheduled):
    """ZipAR (arXiv:2412.04062): a row starts once `window` tokens of the row above exist."""

    word, examples = "zipar", ("zipar=4",)
    window: Annotated[int, "="]

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        return DiagonalSchedule(grid, self.window, row_start="spatial")


@dataclass(frozen=True)
class Exact(Strategy):
    """Raster's tokens, whatever its options, which only affect the speed.

    Tokens are bit-equal if the model's logits of a lane do not depend on the rest of a step, as in
    the native kernels; elsewhere rounding may change a tie. Frames overlap if their actions are
    known.

    Attributes:
        num_lanes: maximum lanes of a step; None chooses by measuring the cost of steps here.
        draft_lag: columns by which a row's drafts stay behind those of the row above; 0 drafts
            nothing ahead. None: chosen by statistics.
        draft_width: columns by which a row's drafts advance per step.
    """

    word, examples = "exact", ("exact", "exact,lanes=32")
    promise = "tokens"
    num_lanes: Annotated[int | None, ",lanes="] = None
    draft_lag: Annotated[int | None, ",draft-lag="] = None
    draft_width: Annotated[int, ",draft-width="] = 3

    def __post_init__(self) -> None:
        check_at_least(self, num_lanes=1, draft_lag=0, draft_width=1)


@dataclass(frozen=True)
class Jacobi(Exact):
    """`Exact` without drafting ahead: plain Jacobi decoding (arXiv:2305.10427)."""

    word, examples = "jacobi", ("jacobi",)
    draft_lag: ClassVar[int] = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    draft_width: ClassVar[int] = 3  # pyright: ignore[reportIncompatibleVariableOverride]


STRATEGIES: tuple[type[Strategy], ...] = (
    Raster,
    Diagonal,
    ZipAR,
    Exact,
    Jacobi,
)


def parse_strategy(text: str) -> Strategy:
    """Parse a strategy, such as `k=1,d=14` or `exact`; ValueError for another text."""
    for kind in STRATEGIES:
        if (strategy := kind.read(text)) is not None:
            return strategy
    refuse_removed(text)
    *others, last = (name for kind in STRATEGIES for name in kind.examples)
    raise ValueError(f"strategy must look like {', '.join(others)} or {last}, got {text!r}")


def refuse_removed(text: str) -> None:
    """Raise ValueError for removed strategies in files of earlier versions."""
    if re.match(r"(sjd|mc-sjd|tolerance|zipar-adaptive)\b", text):
        raise ValueError(f"strategy {text} was removed, runs/rivals.py measures it: use exact")


def parse_strategies(texts: Iterable[str]) -> list[Strategy]:
    """Parse names, several per text if separated by spaces; remove duplicates, keep order."""
    return list(dict.fromkeys(parse_strategy(word) for text in texts for word in text.split()))


def as_strategy(value: Strategy | DiagonalSchedule | str) -> Strategy:
    match value:
        case str():
            return parse_strategy(value)
        case DiagonalSchedule():
            return Diagonal(value.row_lag, value.frame_lag, value.row_start)
        case Strategy():
            return value
        case _:
            raise ValueError(f"strategy must be a name, got {brief(value, 40)}")
