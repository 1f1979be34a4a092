import pytest

from diagd.checks import brief


@pytest.mark.parametrize(
    "value",
    [None, True, -1.5, 10**30, "\udce9'", b"ab", [], {}, (1, (2, "b")), {"a": [1, {}]}, {7}],
)
def test_what_is_short_is_shown_as_repr_shows_it(value):
    assert brief(value) == repr(value)


def lists(depth):
    """Return lists in lists, each twelve times the same one: 12 ** depth numbers."""
    value = [1]
    for _ in range(depth):
        value = [value] * 12
    return value


def maps(depth):
    value = {"a": 1}
    for _ in range(depth):
        value = {"a": value, ("b", "c"): value}
    return value


class Untouchable:
    def __repr__(self):
        raise AssertionError("it is not shown")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lists(80), r"[[[[...], [...], [...], [...], [...], [...], [...], [...]..."),
        (maps(80), r"{'a': {'a': {'a': {...}, (...): {...}}, ('b', 'c'): {'a':..."),
        ((["a" * 40] * 2, Untouchable()), None),
        ("x" * 10**7, "'" + "x" * 56 + "..."),
        (b"x" * 10**7, "b'" + "x" * 55 + "..."),
        ([16**9000], "[36001-bit integer]"),  # more digits than Python prints
        (range(5), "range(0, 5)"),
    ],
)
def test_of_what_is_long_or_deep_only_the_beginning_is_looked_at(value, shown):
    assert len(brief(value)) <= 60
    assert shown in (None, brief(value))
