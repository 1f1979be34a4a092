import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from diagd.web.study.results import OUTCOMES, Vote, sign_test, summarise, tally, wilson

COUNTS = [(0, 1), (1, 1), (3, 7), (7, 3), (10, 10), (0, 25), (25, 0), (63, 41), (400, 371)]


@pytest.mark.parametrize(("wins", "losses"), COUNTS)
def test_the_sign_test_is_the_exact_binomial_one(wins, losses):
    total = wins + losses
    ways = [math.comb(total, heads) for heads in range(total + 1)]
    at_most_as_likely = sum(number for number in ways if number <= ways[wins])
    expected = float(Fraction(at_most_as_likely, 2**total))
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-10)


def test_no_decided_answer_is_no_evidence():
    assert sign_test(0, 0) == 1


@pytest.mark.parametrize(("wins", "losses"), COUNTS)
def test_intervals_are_wilson_s(wins, losses):
    total = wins + losses
    rate, spread = wins / total, 1.959963984540054**2 / total
    # the two rates from which the one seen is 1.96 of their own standard deviations away
    low, high = sorted(np.roots([1 + spread, -(2 * rate + spread), rate**2]))
    assert wilson(wins, total) == pytest.approx((low, high), abs=1e-12)


def test_a_tally_counts_shares_of_all_and_wins_of_the_decided():
    counted = tally(["win"] * 5 + ["tie"] * 3 + ["lose"] * 2)
    assert [counted[outcome] for outcome in (*OUTCOMES, "total")] == [5, 3, 2, 10]
    assert counted["shares"] == {"win": 0.5, "tie": 0.3, "lose": 0.2}
    assert counted["win_rate"] == pytest.approx(5 / 7)
    assert counted["win_rate_interval"] == wilson(5, 7)
    assert counted["share_intervals"]["tie"] == wilson(3, 10)
    assert counted["sign_test"] == sign_test(5, 2)


def test_nothing_answered_has_no_rates():
    counted = tally([])
    assert (counted["total"], counted["win_rate"], counted["sign_test"]) == (0, None, 1)
    assert set(counted["shares"].values()) == {None}


def test_answers_are_counted_per_comparison_question_rater_and_clip():
    """Ann prefers k=1 on both clips, Bob on one of them; k=2 has another outcome."""
    votes = [
        Vote("ann", 0, "a", "quality", "win"),
        Vote("ann", 0, "b", "quality", "win"),
        Vote("bob", 0, "a", "quality", "lose"),
        Vote("bob", 0, "b", "quality", "win"),
        Vote("bob", 0, "b", "consistency", "tie"),
        Vote("ann", 1, "a", "quality", "lose"),
    ]
    results = summarise([("k=1", "raster"), ("k=2", "raster")], ["quality", "consistency"], votes)
    first, second = results["comparisons"]
    quality = first["questions"]["quality"]
    assert (first["first"], first["second"]) == ("k=1", "raster")
    assert [quality["overall"][outcome] for outcome in OUTCOMES] == [3, 0, 1]
    assert [quality["by_clip"][outcome] for outcome in OUTCOMES] == [1, 1, 0]
    assert [quality["raters"]["bob"][outcome] for outcome in OUTCOMES] == [1, 0, 1]
    assert list(first["questions"]["consistency"]["raters"]) == ["bob"]
    assert second["questions"]["quality"]["overall"]["lose"] == 1
    json.loads(json.dumps(results, allow_nan=False))


def test_parts_add_up_to_the_whole():
    cases = itertools.product(("ann", "bob"), "abc", OUTCOMES)
    votes = [Vote(rater, 0, clip, "quality", outcome) for rater, clip, outcome in cases]
    cell = summarise([("k=1", "raster")], ["quality"], votes)["comparisons"][0]["questions"]
    for outcome in (*OUTCOMES, "total"):
        parts = [counted[outcome] for counted in cell["quality"]["raters"].values()]
        assert cell["quality"]["overall"][outcome] == sum(parts)
