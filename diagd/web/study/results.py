"""The results of a study: counts, shares, intervals and sign tests, on a page, a terminal, a chart.

A win is an answer for the first system of a comparison, a lose one for the second.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console

from diagd.console import cell, print_records
from diagd.extras import require
from diagd.files import save_figure

_PAGE_FILE = Path(__file__).with_name("static") / "results.html"
PAGE = Environment(autoescape=True).from_string(_PAGE_FILE.read_text(encoding="utf-8"))
OUTCOMES = ("win", "tie", "lose")
NOTES = (
    "win: the first system was preferred; lose: the second; nobody knew which was which",
    "win rate: wins among wins and losses, ties dropped",
    "intervals are Wilson's at 95% and take answers as independent",
    "p is of the sign test, exact and two-sided; ties are dropped",
    "by clip: one vote a clip, what most of its raters chose; several raters of one clip "
    "are not independent, clips are",
)
COLUMNS = {  # heading and format
    "": "{name}",
    "win": "{win}",
    "tie": "{tie}",
    "lose": "{lose}",
    "win rate": "{win_rate:.2f}",
    "95% interval": "{win_rate_interval[0]:.2f} to {win_rate_interval[1]:.2f}",
    "p": "{sign_test:.3g}",
}
COLOURS = {"win": "#2f7d5b", "tie": "#77736a", "lose": "#b3512c"}  # those of study.css


class Vote(NamedTuple):
    """One answer: `comparison` is an index into the study's, `outcome` one of `OUTCOMES`."""

    rater: str
    comparison: int
    clip: str
    question: str
    outcome: str


def summarise(
    comparisons: Sequence[Sequence[str]], questions: Sequence[str], votes: Sequence[Vote]
) -> dict[str, Any]:
    """Tally votes by comparison and question: overall, by rater, and with one vote a clip."""
    asked = []
    for index, (first, second) in enumerate(comparisons):
        cells: dict[str, Any] = {}
        for question in questions:
            own = [v for v in votes if (v.comparison, v.question) == (index, question)]
            cells[question] = {
                "overall": tally(vote.outcome for vote in own),
                "by_clip": tally(_majority(own, clip) for clip in sorted({v.clip for v in own})),
                "raters": {
                    name: tally(vote.outcome for vote in own if vote.rater == name)
                    for name in sorted({vote.rater for vote in own})
                },
            }
        asked.append({"first": first, "second": second, "questions": cells})
    return {"comparisons": asked, "notes": list(NOTES)}


def tally(outcomes: Iterable[str]) -> dict[str, Any]:
    """Count outcomes: shares are of all answers, the win rate of decided ones; None of nothing."""
    counts = Counter(outcomes)
    numbers = {outcome: counts[outcome] for outcome in OUTCOMES}
    total, wins, losses = sum(numbers.values()), numbers["win"], numbers["lose"]
    decided = wins + losses
    return {
        **numbers,
        "total": total,
        "shares": {name: number / total if total else None for name, number in numbers.items()},
        "share_intervals": {name: wilson(number, total) for name, number in numbers.items()},
        "win_rate": wins / decided if decided else None,
        "win_rate_interval": wilson(wins, decided),
        "sign_test": sign_test(wins, losses),
    }


def _majority(votes: Sequence[Vote], clip: str) -> str:
    counts = Counter(vote.outcome for vote in votes if vote.clip == clip)
    balance = counts["win"] - counts["lose"]
    return "win" if balance > 0 else "lose" if balance < 0 else "tie"


def wilson(successes: int, total: int) -> tuple[float, float] | None:
    """Return the score interval of Wilson (1927) of a rate, at 95%; None of nothing."""
    if not total:
        return None
    z = NormalDist().inv_cdf(0.975)
    rate, scale = successes / total, 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high


def sign_test(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value: under a fair coin wins are Binomial(n, 1/2)."""
    total = wins + losses
    tail = sum(math.comb(total, count) for count in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**total)


def _records(question: dict[str, Any]) -> list[dict[str, Any]]:
    together = [("all raters", question["overall"]), ("by clip", question["by_clip"])]
    return [{"name": name, **own} for name, own in (*together, *question["raters"].items())]


def print_results(results: dict[str, Any], console: Console) -> None:
    for comparison in results["comparisons"]:
        for name, question in comparison["questions"].items():
            title = f"{comparison['first']} against {comparison['second']}: {name}"
            print_records(console, title, COLUMNS, _records(question))
    for note in results["notes"]:
        console.print(note, style="dim")


def results_page(results: dict[str, Any]) -> str:
    return PAGE.render(results, columns=COLUMNS, records=_records, cell=cell)


def write_chart(results: dict[str, Any], path: Path) -> None:
    """Draw one bar for every comparison and question; ValueError without matplotlib."""
    require("a chart", "matplotlib")
    from matplotlib.figure import Figure  # an extra, needed for charts only

    bars = [
        (f"{comparison['first']} vs {comparison['second']}\n{question}", cell["overall"])
        for comparison in results["comparisons"]
        for question, cell in comparison["questions"].items()
    ][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.7 * len(bars)), layout="constrained")
    axis = figure.subplots()
    labels = [f"{label} (n={counted['total']})" for label, counted in bars]
    left = [0.0] * len(bars)
    for outcome in OUTCOMES:
        shares = [100 * (counted["shares"][outcome] or 0) for _, counted in bars]
        drawn = axis.barh(labels, shares, left=left, color=COLOURS[outcome], label=outcome.title())
        texts = [f"{share:.0f}%" if share >= 5 else "" for share in shares]
        axis.bar_label(drawn, texts, label_type="center", color="white", fontweight="bold")
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set(xlim=(0, 100), xlabel="answers, %")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, path, dpi=150)
