"""The results of a study as one HTML page: the paper's stacked bars as SVG, and the numbers."""

from html import escape
from typing import Any

from diagd.web.study.tally import OUTCOMES

MIN_LABEL_PERCENT = 9  # a narrower piece has no room for its number


def results_page(results: dict[str, Any]) -> str:
    """Return the page for what `summarise` returned."""
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
