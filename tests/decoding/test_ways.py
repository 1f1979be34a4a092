"""Names of ways to decode, and that each decodes as its name says."""

import pytest
import torch

import diagd
from diagd.decoding.exact import ExactOptions
from diagd.decoding.ways import LANES, Way, parse_ways
from diagd.decoding.zipar import AdaptiveWindow
from tests.decoding.cases import Case, model_of

CASE = Case(batch_size=1, num_action_tokens=2)
SAMPLED = diagd.SamplingOptions(temperature=1.0)
NAMES = [
    *("raster", "k=2", "k=1,d=4", "k=1/predecessor", "zipar=2", "zipar-adaptive=2"),
    *("exact", "exact,lanes=8", "jacobi", "jacobi,lanes=8", "tolerance=1", "tolerance=1.5"),
    *("tolerance=3,lanes=8", "sjd", "sjd,lanes=8", "mc-sjd", "mc-sjd,lanes=8"),
]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("raster", (None, None, "temporal")),
        ("k=1", (1, None, "temporal")),
        ("k=12,d=24", (12, 24, "temporal")),
        ("k=1/predecessor", (1, None, "predecessor")),
        ("k=2,d=3/spatial", (2, 3, "spatial")),
        ("zipar=4", (4, None, "spatial")),
    ],
)
def test_a_schedule_is_its_name(text, fields):
    way = Way.parse(text)
    assert (way.row_lag, way.frame_lag, way.row_start) == fields
    assert (way.name, way.exact) == (text, False)
    assert way.lossless == ("tokens" if text == "raster" else "no")


@pytest.mark.parametrize(
    ("text", "engine", "lossless"),
    [
        ("exact", ExactOptions(), "tokens"),
        ("exact,lanes=32", ExactOptions(32), "tokens"),
        ("jacobi,lanes=96", ExactOptions(96, draft_lag=0), "tokens"),
        ("tolerance=1.5", ExactOptions(LANES, tolerance=1.5), "no"),
        ("tolerance=1", ExactOptions(LANES), "tokens"),
        ("sjd", ExactOptions(LANES, draft_lag=0, rule="sjd"), "distribution"),
        ("mc-sjd,lanes=96", ExactOptions(96, draft_lag=0, rule="mc-sjd"), "distribution"),
        ("zipar-adaptive=4", AdaptiveWindow(4), "no"),
    ],
)
def test_another_engine_is_its_name(text, engine, lossless):
    way = Way.parse(text)
    assert (way.name, way.exact, way.lossless) == (text, engine, lossless)


def test_each_way_has_one_spelling():
    ways = parse_ways(["k=1/temporal k=1  k=01", "tolerance=1.50", "exact,lanes=08 raster"], 1.0)
    assert [way.name for way in ways] == ["k=1", "tolerance=1.5", "exact,lanes=8", "raster"]


@pytest.mark.parametrize("sampling", [diagd.SamplingOptions(), SAMPLED])
@pytest.mark.parametrize("name", NAMES)
def test_every_way_decodes_and_lossless_ones_write_raster_s_tokens(name, sampling):
    way = Way.parse(name)
    if way.lossless == "distribution" and not sampling.temperature:
        return

    def tokens(way: Way) -> torch.Tensor:
        return diagd.generate_tokens(
            model_of("native"),
            CASE.prompt,
            way.schedule(CASE.grid),
            CASE.actions(),
            row_start=way.row_start,
            exact=way.exact,
            sampling=sampling,
        ).tokens

    equal = torch.equal(tokens(way), tokens(Way.parse("raster")))
    assert equal == (way.lossless == "tokens")


@pytest.mark.parametrize(
    "text",
    [
        *("", "k", "k=", "k=1,", "k=-1", "d=3", "k=1;d=3", "raster/spatial", "raster,lanes=8"),
        *("exact=2", "exact,d=2", "exact/spatial", "tolerance", "tolerance=x", "zipar", "SJD"),
        *("zipar-adaptive", "zipar=2/spatial", "sjd,lanes=", "jacobi, lanes=2", "exact,lanes=-1"),
    ],
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"a way to decode looks like raster, k=2, .*, got '"):
        Way.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=1/first", "row_start must be one of .*temporal.*, got 'first'"),
        ("k=1/", "row_start must be one of .*temporal.*, got ''"),
        ("exact,lanes=0", "num_lanes must be at least 1, got 0"),
        ("tolerance=0.5", "tolerance must be at least 1 and finite, got 0.5"),
    ],
)
def test_numbers_that_a_way_cannot_have_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Way.parse(text)


@pytest.mark.parametrize("text", ["k=6", "zipar=6", "zipar-adaptive=6", "zipar=0"])
def test_a_lag_or_window_wider_than_the_grid_is_refused(text):
    with pytest.raises(ValueError, match=r"row_lag must be in \[1, width=5\], got [06]"):
        Way.parse(text).schedule(CASE.grid)


@pytest.mark.parametrize("text", ["sjd", "mc-sjd,lanes=8"])
def test_speculation_needs_a_temperature(text):
    with pytest.raises(ValueError, match=f"{text} needs a temperature above 0"):
        parse_ways(["k=1", text], temperature=0)
    assert len(parse_ways(["k=1", text], temperature=0.1)) == 2


@pytest.mark.parametrize("text", ["sjd", "mc-sjd", "zipar-adaptive=2"])
def test_some_ways_need_eager_steps(text):
    with pytest.raises(ValueError, match=f"{text} needs backend eager or native, got cuda-graph"):
        Way.parse(text).check(1.0, "cuda-graph")
    Way.parse("exact").check(1.0, "cuda-graph")
