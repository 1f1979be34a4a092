"""Rows that were disturbed are told from those that were not, by timings made up or published."""

import pytest

from diagd.benchmark.bench import is_disturbed, print_rows

# as docs/results/speed.md published it: mc-ar-42m, float32 native
DISTURBED = {
    "dtype": "float32",
    "backend": "native",
    "strategy": "k=4",
    "steps": 152,
    "context_frames": 1,
    **{"seconds": 0.82, "seconds_min": 0.69, "seconds_max": 6.19, "ms_per_step": 5.40},
    "step_ms": {"p50": 5.41, "p99": 211.17, "min": 3.33, "max": 229.4},
    "parts_ms": {
        **{"linears": 11.33, "attention": 2.67},
        **{"forward": 15.90, "sampling": 0.76, "bookkeeping": 0.18},
    },
}
# the row above it, k=2
QUIET = {
    "dtype": "float32",
    "backend": "native",
    "strategy": "k=2",
    "steps": 100,
    "context_frames": 1,
    **{"seconds": 0.54, "seconds_min": 0.54, "seconds_max": 0.63, "ms_per_step": 5.43},
    "step_ms": {"p50": 5.71, "p99": 7.80, "min": 3.40, "max": 8.12},
    "parts_ms": {
        **{"linears": 4.33, "attention": 0.80},
        **{"forward": 5.36, "sampling": 0.16, "bookkeeping": 0.15},
    },
}


def test_the_published_row_is_caught_and_its_neighbour_is_not():
    assert is_disturbed(DISTURBED)
    assert not is_disturbed(QUIET)


@pytest.mark.parametrize("names", [("seconds_min", "seconds_max"), ("step_ms",), ("parts_ms",)])
def test_each_contradiction_alone_is_enough(names):
    assert is_disturbed(QUIET | {name: DISTURBED[name] for name in names})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seconds_min": 0.5, "seconds_max": 1.0}, False),
        ({"seconds_min": 0.5, "seconds_max": 1.01}, True),
        ({"step_ms": {"p50": 2.0, "p99": 20.0}}, False),
        ({"step_ms": {"p50": 2.0, "p99": 20.1}}, True),
        ({"ms_per_step": 4.0, "parts_ms": {"forward": 5.0, "bookkeeping": 1.0}}, False),
        ({"ms_per_step": 4.0, "parts_ms": {"forward": 5.0, "bookkeeping": 1.1}}, True),
        # the linears and attention are inside of forward
        (
            {"ms_per_step": 4.0, "parts_ms": {"forward": 3.0, "linears": 2.5, "attention": 2.0}},
            False,
        ),
    ],
)
def test_the_bounds_are_kept(changes, expected):
    assert is_disturbed(QUIET | changes) is expected


def test_a_row_without_steps_is_judged_by_its_repeats():
    """As Hugging Face's, of which no step is timed."""
    plain = {name: QUIET[name] for name in ("seconds_min", "seconds_max", "ms_per_step")}
    assert not is_disturbed(plain)
    assert is_disturbed(plain | {"seconds_max": 2.0})


def test_the_table_marks_a_disturbed_row_and_says_so_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    document = {
        "options": {"model": "doom", "repeats": 3},
        **{"parameters": 8e6, "device": "a machine", "threads": 2, "torch": "2.13"},
        "ceilings": {},
        "rows": [row | {"disturbed": is_disturbed(row)} for row in (QUIET, DISTURBED)],
    }
    print_rows(document)
    printed = capsys.readouterr().out
    assert printed.count("k=4 !") == 2  # in both tables
    assert "k=2 !" not in printed
    (note,) = (line for line in printed.splitlines() if "disturbed" in line)
    assert note == "! disturbed: k=4 (times contradict each other): measure again"
