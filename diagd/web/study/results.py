"""The results of a study: counts, shares, intervals and sign tests, on a page, a terminal, a chart.

A win is an answer for the first system of a comparison, a lose one for the second. The sign test is
exact and two-sided: under "no difference" wins among the decided answers are Binomial(n, 1/2).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rich.console import Console

from diagd.console import print_table
from diagd.extras import require
from diagd.files import save_figure

PAGE = Path(__file__).with_name("static") / "results.html"
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
HEADER = ("", *OUTCOMES, "win rate", "95% interval", "p")
MIN_LABEL_PERCENT = 9  # a narrower piece of the page's bars has no room for its number
COLOURS = {"win": "#2f7d5b", "tie": "#77736a", "lose": "#b3512c"}  # those of study.css


@dataclass(frozen=True)
class Vote:
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


def _rows(cell: dict[str, Any]) -> list[list[str]]:
    """Format the lines of a question's table, with the columns of `HEADER`."""
    rows = []
    named = [("all raters", cell["overall"]), ("by clip", cell["by_clip"]), *cell["raters"].items()]
    for name, counted in named:
        rate, interval = "-", "-"
        if counted["win_rate"] is not None:
            rate = f"{counted['win_rate']:.2f}"
            interval = " to ".join(f"{end:.2f}" for end in counted["win_rate_interval"])
        counts = (str(counted[outcome]) for outcome in OUTCOMES)
        rows.append([name, *counts, rate, interval, f"{counted['sign_test']:.3g}"])
    return rows


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print a table for every comparison and question, and the notes."""
    for comparison in results["comparisons"]:
        for question, cell in comparison["questions"].items():
            title = f"{comparison['first']} against {comparison['second']}: {question}"
            print_table(console, title, HEADER, _rows(cell))
    for note in results["notes"]:
        console.print(note, style="dim")


def results_page(results: dict[str, Any]) -> str:
    """Format the results as HTML: a bar and a table for every comparison and question."""
    parts = []
    for comparison in results["comparisons"]:
        first, second = escape(comparison["first"]), escape(comparison["second"])
        meanings = (f"{first} better", "the same", f"{second} better")
        parts.append(f'<section><h2>{first} against {second}</h2><p class="legend">')
        keys = zip(OUTCOMES, meanings, strict=True)
        parts += [f'<span class="key {outcome}">{text}</span>' for outcome, text in keys]
        parts.append("</p>")
        for question, cell in comparison["questions"].items():
            parts.append(f"<h3>{escape(question)}</h3>{_bar(cell['overall'])}")
            parts.append(_table(f"Numbers for {escape(question)}", _rows(cell)))
        parts.append("</section>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in results["notes"])
    parts.append(f'<ul class="notes">{notes}</ul>')
    return PAGE.read_text(encoding="utf-8").replace("<!-- results -->", "".join(parts))


def _bar(counted: dict[str, Any]) -> str:
    """Draw win, tie and lose as one stacked bar, as wide as the page."""
    pieces, left = [], 0.0
    for outcome in OUTCOMES:
        share = 100 * (counted["shares"][outcome] or 0)
        place = f'x="{left:.3f}%" width="{share:.3f}%" height="100%"'
        pieces.append(f'<rect class="{outcome}" {place}/>')
        if share >= MIN_LABEL_PERCENT:
            pieces.append(f'<text x="{left + share / 2:.3f}%" y="50%">{share:.0f}%</text>')
        left += share
    if not counted["total"]:
        pieces.append('<text class="none" x="50%" y="50%">no answers yet</text>')
    counts = ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES)
    return f'<svg class="bar" role="img" aria-label="{counts}">{"".join(pieces)}</svg>'


def _table(label: str, rows: list[list[str]]) -> str:
    heads = "".join(f'<th scope="col">{head}</th>' for head in HEADER)
    body = ""
    for name, *cells in rows:
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


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
