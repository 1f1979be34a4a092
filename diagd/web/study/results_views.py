"""What `summarise` counted, as an HTML page, as a table for the terminal, and as a PNG chart.

Page and chart draw the paper's stacked bars of win, tie and lose.
"""

from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from diagd.console import print_table
from diagd.extras import require
from diagd.files import replacing
from diagd.web.study.results import OUTCOMES

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
