"""Short forms of strategies: `row_lag=2`, `raster=True`, `exact=True` and the flags like them."""

from typing import Any

from diagd.decoding.schedule import RowStart
from diagd.decoding.strategies.strategy import Diagonal, Exact, Raster, Strategy, as_strategy


def strategy_of(
    strategy: Strategy | str | None = None,
    row_lag: int | None = None,
    frame_lag: int | None = None,
    row_start: RowStart | None = None,
    *,
    raster: bool = False,
    exact: bool = False,
) -> Strategy:
    """Return the strategy asked for, in full or in short; `k=1` where nothing is.

    Raises:
        ValueError: more than one asked for, or no such strategy.
    """
    lags: dict[str, Any] = {"row_lag": row_lag, "frame_lag": frame_lag, "row_start": row_start}
    given = {name: value for name, value in lags.items() if value is not None}
    asked = [name for name, value in (("raster", raster), ("exact", exact)) if value]
    if strategy is not None:
        asked.insert(0, "strategy")
    if len(asked) + bool(given) > 1:
        raise ValueError(f"one strategy at a time, got {' and '.join([*asked, *given])}")
    if strategy is not None:
        return as_strategy(strategy)
    if raster:
        return Raster()
    if exact:
        return Exact()
    return Diagonal(given.pop("row_lag", 1), **given)
