import pytest

from diagd.evaluation.protocol import PROTOCOLS, Protocol, ScheduleSpec, seed_of


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("raster", (None, None, "temporal")),
        ("k=1", (1, None, "temporal")),
        ("k=12,d=24", (12, 24, "temporal")),
        ("k=1/predecessor", (1, None, "predecessor")),
        ("k=2,d=3/spatial", (2, 3, "spatial")),
    ],
)
def test_a_schedule_is_its_name(text, fields):
    spec = ScheduleSpec.parse(text)
    assert (spec.row_lag, spec.frame_lag, spec.row_start) == fields
    assert spec.name == text


def test_the_default_row_start_is_left_out_of_the_name():
    assert ScheduleSpec.parse("k=1/temporal").name == "k=1"


@pytest.mark.parametrize(
    "text", ["", "k", "k=", "k=1,", "k=-1", "d=3", "k=1;d=3", "raster/spatial"]
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"schedule must look like raster, exact, k=2"):
        ScheduleSpec.parse(text)


def test_an_unknown_row_start_is_refused():
    with pytest.raises(ValueError, match=r"row start must be one of .*temporal.*, got 'first'"):
        ScheduleSpec.parse("k=1/first")


def test_protocols_are_the_paper_s():
    assert {
        "cosmos": Protocol(100, 33, 9),
        "wham": Protocol(100, 100, 10, 10),
        "mc-ar": Protocol(100, 16, 1),
    } == PROTOCOLS


def test_seeds_differ_between_clips_and_follow_the_base_seed():
    assert seed_of("clip_1", 0) == seed_of("clip_1", 0)
    assert seed_of("clip_1", 5) == seed_of("clip_1", 0) + 5
    assert len({seed_of(f"clip_{n}", 0) for n in range(100)}) == 100
    assert all(0 <= seed_of(f"clip_{n}", 2**30) < 2**31 for n in range(100))
