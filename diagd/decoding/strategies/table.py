"""Every strategy by its name: one vocabulary for commands, scripts and the API.

    raster                            next-token prediction
    k=2  k=1,d=14  k=1/predecessor    diagonals: row_lag, frame_lag (frames overlap), row start
    zipar=4  zipar-adaptive=4         ZipAR with that window, or with it at least
    exact  exact,lanes=32             raster's tokens in fewer steps of so many lanes
    jacobi  jacobi,lanes=96           the same without drafts ahead
    tolerance=1.5                     a draft stays that 1.5 times its probability would draw
    sjd  mc-sjd,lanes=96              speculative Jacobi decoding, and with maximal coupling

Without lanes, `exact` and `jacobi` measure what a step costs; what they write does not depend on
it. A new strategy is a class beside these and a line in `STRATEGIES`.
"""

from collections.abc import Iterable

from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.strategies.diagonal import Diagonal, Raster, ZipAR
from diagd.decoding.strategies.exact.exact import Exact, Jacobi, Tolerant
from diagd.decoding.strategies.exact.speculative import CoupledJacobi, SpeculativeJacobi
from diagd.decoding.strategies.strategy import Strategy
from diagd.decoding.strategies.zipar_adaptive import AdaptiveZipAR

STRATEGIES: tuple[type[Strategy], ...] = (
    Raster,
    Diagonal,
    ZipAR,
    AdaptiveZipAR,
    Exact,
    Jacobi,
    Tolerant,
    SpeculativeJacobi,
    CoupledJacobi,
)


def parse_strategy(text: str) -> Strategy:
    """Read a strategy's name.

    Args:
        text: such as `k=1,d=14` or `exact`; the table at the top of the module has them all.

    Raises:
        ValueError: no such strategy, or a number that it cannot have.
    """
    for kind in STRATEGIES:
        strategy = kind.read(text)
        if strategy is not None:
            return strategy
    raise ValueError(
        "a strategy looks like raster, k=2, k=1,d=14, k=1/predecessor, zipar=4, zipar-adaptive=4, "
        f"exact, exact,lanes=32, jacobi, tolerance=1.5, sjd or mc-sjd, got {text!r}"
    )


def parse_strategies(texts: Iterable[str]) -> list[Strategy]:
    """Read names, of which a text may hold several with spaces between; each once, in order.

    Raises:
        ValueError: a name that is none.
    """
    return list(dict.fromkeys(parse_strategy(word) for text in texts for word in text.split()))


def as_strategy(value: Strategy | DiagonalSchedule | str) -> Strategy:
    """Return a strategy as it is, read its name, or let its schedule say its lags."""
    if isinstance(value, str):
        return parse_strategy(value)
    if isinstance(value, DiagonalSchedule):
        return Diagonal(value.row_lag, value.frame_lag)
    return value
