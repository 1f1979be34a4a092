"""What the answers of a study say: counts, shares, intervals and sign tests; no dependencies.

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
from diagd.files import replacing

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


HEADER = ("", *OUTCOMES, "win rate", "95% interval", "p")  # on the terminal
MIN_LABEL_PERCENT = 9  # a narrower piece of the page's bars has no room for its number
COLOURS = {"win": "#2f7d5b", "tie": "#77736a", "lose": "#b3512c"}  # those of study.css


def results_page(results: dict[str, Any]) -> str:
    """Return the page."""
    sections = "".join(_section(comparison) for comparison in results["comparisons"])
    notes = "".join(f"<li>{escape(note)}</li>" for note in results["notes"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Results of the study</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/study.css">
</head>
<body class="results">
<main>
<h1>Results</h1>
{sections}
<ul class="notes">{notes}</ul>
</main>
</body>
</html>
"""


def _section(comparison: dict[str, Any]) -> str:
    first, second = escape(comparison["first"]), escape(comparison["second"])
    questions = "".join(_question(*item) for item in comparison["questions"].items())
    legend = "".join(
        f'<span class="key {outcome}">{text}</span>'
        for outcome, text in zip(
            OUTCOMES, (f"{first} better", "the same", f"{second} better"), strict=True
        )
    )
    return (
        f"<section><h2>{first} against {second}</h2>"
        f'<p class="legend">{legend}</p>{questions}</section>'
    )


def _question(question: str, cell: dict[str, Any]) -> str:
    rows = [("all raters", cell["overall"]), ("by clip", cell["by_clip"])]
    rows += [(name, tally) for name, tally in cell["raters"].items()]
    body = "".join(_row(name, tally) for name, tally in rows)
    heads = ("", "win", "tie", "lose", "win rate", "p")
    return (
        f"<h3>{escape(question)}</h3>{bar(cell['overall'])}"
        '<div class="scroll" tabindex="0" role="region" '
        f'aria-label="Numbers for {escape(question)}"><table><thead><tr>'
        + "".join(f'<th scope="col">{head}</th>' for head in heads)
        + f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bar(tally: dict[str, Any]) -> str:
    """Draw win, tie and lose as one stacked bar, as wide as the page."""
    pieces, left = [], 0.0
    for outcome in OUTCOMES:
        share = 100 * (tally["shares"][outcome] or 0)
        pieces.append(
            f'<rect class="{outcome}" x="{left:.3f}%" width="{share:.3f}%" height="100%"/>'
        )
        if share >= MIN_LABEL_PERCENT:
            pieces.append(f'<text x="{left + share / 2:.3f}%" y="50%">{share:.0f}%</text>')
        left += share
    if not tally["total"]:
        pieces.append('<text class="none" x="50%" y="50%">no answers yet</text>')
    counts = ", ".join(f"{tally[outcome]} {outcome}" for outcome in OUTCOMES)
    return f'<svg class="bar" role="img" aria-label="{counts}">{"".join(pieces)}</svg>'


def _row(name: str, tally: dict[str, Any]) -> str:
    rate = "-"
    if tally["win_rate"] is not None:
        low, high = tally["win_rate_interval"]
        rate = f"{tally['win_rate']:.0%} <small>[{low:.0%}, {high:.0%}]</small>"
    p_value = tally["sign_test"]
    test = f"{p_value:.3f}" if p_value >= 0.001 else "&lt; 0.001"
    counts = "".join(f"<td>{tally[outcome]}</td>" for outcome in OUTCOMES)
    return f'<tr><th scope="row">{escape(name)}</th>{counts}<td>{rate}</td><td>{test}</td></tr>'


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print a table for every comparison and question, and the notes."""
    for comparison in results["comparisons"]:
        for question, cell in comparison["questions"].items():
            title = f"{comparison['first']} against {comparison['second']}: {question}"
            print_table(console, title, HEADER, _lines(cell))
    for note in results["notes"]:
        console.print(note, style="dim")


def _lines(cell: dict[str, Any]) -> list[list[str]]:
    lines: list[list[str]] = []
    rows = [("all raters", cell["overall"]), ("by clip", cell["by_clip"])]
    for name, tally in (*rows, *cell["raters"].items()):
        rate, interval = "-", "-"
        if tally["win_rate"] is not None:
            rate = f"{tally['win_rate']:.2f}"
            interval = " to ".join(f"{end:.2f}" for end in tally["win_rate_interval"])
        counts = (str(tally[outcome]) for outcome in OUTCOMES)
        lines.append([name, *counts, rate, interval, f"{tally['sign_test']:.3g}"])
    return lines


def write_chart(results: dict[str, Any], path: Path) -> None:
    """Draw one bar for every comparison and question.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    require("a chart", "matplotlib")
    from matplotlib.figure import Figure  # an extra, needed for charts only

    bars = [
        (f"{comparison['first']} vs {comparison['second']}\n{question}", cell["overall"])
        for comparison in results["comparisons"]
        for question, cell in comparison["questions"].items()
    ][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.7 * len(bars)), layout="constrained")
    axis = figure.subplots()
    labels = [f"{label} (n={tally['total']})" for label, tally in bars]
    left = [0.0] * len(bars)
    for outcome in OUTCOMES:
        shares = [100 * (tally["shares"][outcome] or 0) for _, tally in bars]
        drawn = axis.barh(labels, shares, left=left, color=COLOURS[outcome], label=outcome.title())
        texts = [f"{share:.0f}%" if share >= 5 else "" for share in shares]
        axis.bar_label(drawn, texts, label_type="center", color="white", fontweight="bold")
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set(xlim=(0, 100), xlabel="answers, %")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
