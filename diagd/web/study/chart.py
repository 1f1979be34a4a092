"""The paper's figure of its human evaluation: stacked bars of win, tie and lose, as PNG."""

from pathlib import Path
from typing import Any

from diagd.files import replacing
from diagd.web.study.tally import OUTCOMES

COLOURS = {"win": "#2f7d5b", "tie": "#77736a", "lose": "#b3512c"}


def write_chart(results: dict[str, Any], path: Path) -> None:
    """Draw what `summarise` returned, one bar for every comparison and question.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # an extra, needed for this file only
    except ModuleNotFoundError:
        raise ValueError("a chart needs matplotlib: pip install 'diagd[metrics]'") from None
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
