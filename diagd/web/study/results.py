"""What the answers of a study say: counts, shares, intervals and sign tests; no dependencies.

A win is an answer for the first system of a comparison, a lose one for the second. The sign test is
exact and two-sided: under "no difference" wins among the decided answers are Binomial(n, 1/2).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

OUTCOMES = ("win", "tie", "lose")
CONFIDENCE = 0.95
NOTES = (
    "win: the first system was preferred; lose: the second; nobody knew which was which",
    "win rate: wins among wins and losses, ties dropped",
    "intervals are Wilson's at 95% and take answers as independent",
    "p is of the sign test, exact and two-sided; ties are dropped",
    "by clip: one vote a clip, what most of its raters chose; several raters of one clip "
    "are not independent, clips are",
)


@dataclass(frozen=True)
class Vote:
    """One answer.

    Attributes:
        comparison: index into the study's comparisons.
        outcome: one of `OUTCOMES`.
    """

    rater: str
    comparison: int
    clip: str
    question: str
    outcome: str


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Return the Wilson score interval of a rate, at 95%; `total` is at least 1.

    Wilson (1927): centre (p + z^2 / 2n) / (1 + z^2 / n), with z the normal quantile.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    rate, scale = successes / total, 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high


def sign_test(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value of wins against losses under a fair coin."""
    total = wins + losses
    tail = sum(math.comb(total, count) for count in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**total)


def summarise(
    comparisons: Sequence[Sequence[str]], questions: Sequence[str], votes: Sequence[Vote]
) -> dict[str, Any]:
    """Count answers for every comparison and question, over all raters and for each rater.

    Returns:
        A JSON document: `comparisons[i].questions[question].overall` and `.raters[name]`, each as
        `tally` describes, and `.by_clip`, where a clip has one vote.
    """
    asked = []
    for index, (first, second) in enumerate(comparisons):
        cells: dict[str, Any] = {}
        for question in questions:
            own = [v for v in votes if (v.comparison, v.question) == (index, question)]
            raters = sorted({vote.rater for vote in own})
            cells[question] = {
                "overall": tally(vote.outcome for vote in own),
                "by_clip": tally(_majority(own, clip) for clip in sorted({v.clip for v in own})),
                "raters": {
                    name: tally(vote.outcome for vote in own if vote.rater == name)
                    for name in raters
                },
            }
        asked.append({"first": first, "second": second, "questions": cells})
    return {"comparisons": asked, "notes": list(NOTES)}


def tally(outcomes: Iterable[str]) -> dict[str, Any]:
    """Count outcomes.

    Returns:
        win, tie, lose: counts. total: their sum. shares, share_intervals: of each outcome among
        all answers. win_rate, win_rate_interval: wins among decided answers. sign_test: p-value.
        Rates of nothing are None.
    """
    counts = Counter(outcomes)
    numbers = {outcome: counts[outcome] for outcome in OUTCOMES}
    total, wins, losses = sum(numbers.values()), numbers["win"], numbers["lose"]
    decided = wins + losses
    return {
        **numbers,
        "total": total,
        "shares": {name: number / total if total else None for name, number in numbers.items()},
        "share_intervals": {
            name: wilson(number, total) if total else None for name, number in numbers.items()
        },
        "win_rate": wins / decided if decided else None,
        "win_rate_interval": wilson(wins, decided) if decided else None,
        "sign_test": sign_test(wins, losses),
    }


def _majority(votes: Sequence[Vote], clip: str) -> str:
    counts = Counter(vote.outcome for vote in votes if vote.clip == clip)
    balance = counts["win"] - counts["lose"]
    return "win" if balance > 0 else "lose" if balance < 0 else "tie"
