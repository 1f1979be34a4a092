"""Strategies and their names: one spelling each, read back, refused where it is none."""

import dataclasses

import pytest

import diagd
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import (
    STRATEGIES,
    Diagonal,
    Exact,
    Jacobi,
    Raster,
    ZipAR,
    as_strategy,
    parse_strategies,
)

GRID = TokenGrid(1, 3, 5)
SPELLED = {
    "raster": Raster(),
    "k=1": Diagonal(1),
    "k=12,d=24": Diagonal(12, 24),
    "k=1/predecessor": Diagonal(1, row_start="predecessor"),
    "k=2,d=3/spatial": Diagonal(2, 3, "spatial"),
    "k=1/action": Diagonal(1, row_start="action"),
    "zipar=4": ZipAR(4),
    "exact": Exact(),
    "exact,lanes=32": Exact(32),
    "exact,lanes=8,draft-lag=1,draft-width=2": Exact(8, 1, 2),
    "jacobi": Jacobi(),
    "jacobi,lanes=96": Jacobi(96),
}


@pytest.mark.parametrize("text", SPELLED)
def test_a_strategy_has_one_spelling_that_is_read_back(text):
    strategy = SPELLED[text]
    assert diagd.parse_strategy(text) == strategy
    assert (strategy.name, str(strategy), hash(strategy)) == (text, text, hash(SPELLED[text]))
    assert strategy.promise in ("tokens", "no")
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.word = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_every_strategy_of_the_table_is_spelled_here():
    assert {type(strategy) for strategy in SPELLED.values()} == set(STRATEGIES)
    assert len({kind.word for kind in STRATEGIES}) == len(STRATEGIES)


def test_other_spellings_become_the_one():
    texts = ["k=1/temporal k=1  k=01", "exact,lanes=08 raster"]
    names = [strategy.name for strategy in parse_strategies(texts)]
    assert names == ["k=1", "exact,lanes=8", "raster"]


def test_a_schedule_and_a_strategy_are_taken_as_they_are():
    schedule = diagd.DiagonalSchedule(GRID, 2, 4)
    assert as_strategy(schedule) == Diagonal(2, 4)
    assert as_strategy(Exact(3)) == Exact(3)
    assert as_strategy("k=2") == Diagonal(2)
    for other in (3, {"k": 2}, None):
        with pytest.raises(ValueError, match="strategy must be a name, got "):
            as_strategy(other)  # pyright: ignore[reportArgumentType]


def test_raster_s_schedule_is_raster():
    grid = TokenGrid(2, 3, 5)
    assert Raster().schedule(grid) == diagd.DiagonalSchedule.raster(grid)
    assert Diagonal(2).schedule(grid) == diagd.DiagonalSchedule.spatial(grid, 2)
    assert ZipAR(2).schedule(grid) == diagd.DiagonalSchedule(grid, 2, row_start="spatial")


@pytest.mark.parametrize(
    "text",
    [
        *("", "k", "k=", "k=1,", "k=-1", "d=3", "k=1;d=3", "raster/spatial", "raster,lanes=8"),
        *("exact=2", "exact,d=2", "exact/spatial", "zipar", "SJD", "zipar=2.5"),
        *("zipar=2/spatial", "exact,lanes=", "jacobi, lanes=2", "exact,lanes=-1"),
    ],
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"strategy must look like raster, k=2, .*, got '"):
        diagd.parse_strategy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=1/first", "row_start must be one of .*temporal.*, got 'first'"),
        ("k=1/", "row_start must be one of .*temporal.*, got ''"),
        ("exact,lanes=0", "num_lanes must be at least 1, got 0"),
    ],
)
def test_numbers_that_a_strategy_cannot_have_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        diagd.parse_strategy(text)


@pytest.mark.parametrize("text", ["k=6", "zipar=6", "zipar=0"])
def test_a_lag_or_window_wider_than_the_grid_is_refused(text):
    with pytest.raises(ValueError, match=r"row_lag must be in \[1, width=5\], got [06]"):
        diagd.parse_strategy(text).check(GRID)


@pytest.mark.parametrize("text", ["sjd", "mc-sjd,lanes=8", "tolerance=1.5", "zipar-adaptive=2"])
def test_what_was_removed_is_said_to_be(text):
    with pytest.raises(ValueError, match=f"^strategy {text} was removed, .*: use exact$"):
        diagd.parse_strategy(text)
