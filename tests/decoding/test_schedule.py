"""`diagd/decoding/schedule.py`: the formula is the simulation, and the paper's numbers hold."""

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diagd
from tests import oracles

PAPER = {  # grid: row_lag, frame_lag, steps (design section 6)
    "3x40x64": (
        *((1, d, steps) for d, steps in ((1, 105), (5, 113), (9, 121), (40, 183))),
        *((2, d, steps) for d, steps in ((2, 146), (10, 162), (18, 178), (80, 302))),
        *((4, d, steps) for d, steps in ((4, 228), (12, 244), (20, 260), (36, 292))),
        (64, 2560, 7680),
    ),
    "100x18x30": ((1, None, 4700), (2, None, 6400), (30, 540, 54000)),
    "15x14x24": ((1, None, 555), (2, None, 750), (4, None, 1140), (24, 336, 5040)),
}


@pytest.mark.parametrize("grid", PAPER)
def test_steps_of_the_paper(grid):
    size = diagd.TokenGrid.parse(grid)
    for row_lag, frame_lag, steps in PAPER[grid]:
        schedule = diagd.DiagonalSchedule(size, row_lag, frame_lag)
        assert schedule.num_steps == steps, (row_lag, frame_lag)
    row_lag, frame_lag, _ = PAPER[grid][-1]
    raster = diagd.DiagonalSchedule(size, row_lag, frame_lag)
    assert raster == diagd.DiagonalSchedule.raster(size)
    assert raster.speedup == 1.0


@st.composite
def schedules(draw: st.DrawFn) -> diagd.DiagonalSchedule:
    num_frames = draw(st.integers(1, 4))
    height = draw(st.integers(1, 6))
    width = draw(st.integers(1, 7).filter(lambda width: width != height))
    row_lag = draw(st.integers(1, width))
    frame_lag = draw(st.integers(1, (height - 1) * row_lag + width))
    grid = diagd.TokenGrid(num_frames, height, width)
    return diagd.DiagonalSchedule(grid, row_lag, frame_lag)


def every_place(grid: diagd.TokenGrid) -> list[tuple[int, int, int]]:
    return [
        (t, i, j)
        for t in range(grid.num_frames)
        for i in range(grid.height)
        for j in range(grid.width)
    ]


def test_without_a_frame_lag_frames_do_not_overlap():
    grid = diagd.TokenGrid(16, 14, 24)
    assert diagd.DiagonalSchedule(grid, 1) == diagd.DiagonalSchedule.spatial(grid, 1)
    assert diagd.DiagonalSchedule(grid, 1).num_steps == 592


def test_overlapping_frames_are_row_lag_times_height_apart():
    grid = diagd.TokenGrid(3, 40, 64)
    for row_lag, steps in [(1, 183), (2, 302)]:
        schedule = diagd.DiagonalSchedule.overlapping(grid, row_lag)
        assert schedule == diagd.DiagonalSchedule(grid, row_lag, row_lag * 40)
        assert schedule.num_steps == steps


def test_speedup_is_tokens_over_steps():
    schedule = diagd.DiagonalSchedule(diagd.TokenGrid(3, 40, 64), 1, 40)
    assert schedule.speedup == pytest.approx(7680 / 183)


@given(schedules())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_formula_is_the_simulation(schedule):
    grid = schedule.grid
    steps = oracles.simulate_schedule(
        grid.num_frames,
        grid.height,
        grid.width,
        schedule.row_lag,
        schedule.frame_lag,
    )
    assert schedule.num_steps == len(steps)
    for step, places in enumerate(steps):
        for place in places:
            assert schedule.step_of(*place) == step
    assert Counter(place for places in steps for place in places) == Counter(every_place(grid))
    assert schedule.max_lanes == max(len(places) for places in steps)


@given(schedules())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_raster_writes_one_token_a_step_in_reading_order(schedule):
    raster = diagd.DiagonalSchedule.raster(schedule.grid)
    places = every_place(schedule.grid)
    assert [raster.step_of(*place) for place in places] == list(range(len(places)))


@pytest.mark.parametrize("row_lag", [0, -1, 25])
def test_row_lag_out_of_bounds_is_an_error(row_lag):
    with pytest.raises(ValueError, match=rf"^row_lag must be in \[1, width=24\], got {row_lag}$"):
        diagd.DiagonalSchedule(diagd.TokenGrid(15, 14, 24), row_lag)


@pytest.mark.parametrize("frame_lag", [0, -3, 38])
def test_frame_lag_out_of_bounds_is_an_error_that_names_the_bound(frame_lag):
    message = rf"^frame_lag must be in \[1, .*37\], got {frame_lag}$"  # (14 - 1) * 1 + 24
    with pytest.raises(ValueError, match=message):
        diagd.DiagonalSchedule(diagd.TokenGrid(15, 14, 24), 1, frame_lag)


def test_frame_lag_at_its_bounds_is_accepted():
    grid = diagd.TokenGrid(15, 14, 24)
    assert diagd.DiagonalSchedule(grid, 1, 1).num_steps == 14 + 13 + 24
    assert diagd.DiagonalSchedule(grid, 1, 37) == diagd.DiagonalSchedule.spatial(grid)


@pytest.mark.parametrize("sizes", [(0, 14, 24), (15, 0, 24), (15, 14, 0), (15, -1, 24)])
def test_a_grid_has_at_least_one_token(sizes):
    with pytest.raises(ValueError, match=r"got -?\d+"):
        diagd.TokenGrid(*sizes)


def test_sizes_and_lags_are_whole_numbers():
    with pytest.raises(ValueError, match=r"^num_frames must be a whole number, got 1\.5$"):
        diagd.TokenGrid(cast(Any, 1.5), 2, 3)
    for name in ("row_lag", "frame_lag"):
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number, got 1\.5$"):
            diagd.DiagonalSchedule(diagd.TokenGrid(1, 2, 3), **{"row_lag": 1, name: 1.5})


def test_grid_is_parsed_from_frames_height_width():
    assert diagd.TokenGrid.parse("3x40x64") == diagd.TokenGrid(3, 40, 64)
    assert diagd.TokenGrid.parse("3x40x64").tokens_per_frame == 2560
    assert diagd.TokenGrid.parse("3x40x64").num_tokens == 7680


@pytest.mark.parametrize("text", ["3x40", "3x40x64x2", "axbxc", "", "3,40,64"])
def test_a_grid_that_cannot_be_parsed_is_an_error(text):
    with pytest.raises(ValueError, match=f"got .*{text}"):
        diagd.TokenGrid.parse(text)
