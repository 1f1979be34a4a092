"""Charts of training and tuning, as PNG."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from diagd.files import read_json_lines, save_figure


def plot_loss(folder: Path) -> None:
    """Plot a run's log.jsonl as loss.png, with the held-out loss if it was measured."""
    lines = read_json_lines(folder / "log.jsonl")
    with chart(folder / "loss.png", xlabel="step", ylabel="loss, nats per token") as axis:
        for key, style, label in (("loss", "-", "training"), ("validation_loss", "o-", "held out")):
            if shown := [(line["step"], line[key]) for line in lines if key in line]:
                axis.plot(*zip(*shown, strict=True), style, linewidth=1, markersize=4, label=label)


@contextmanager
def chart(path: Path, height: float = 4, legend: str | None = None, **labels: str) -> Iterator[Any]:
    """Yield the axes of a chart with a grid and a legend, and write it as PNG."""
    figure = Figure(figsize=(7, height), layout="constrained")
    axis = figure.subplots()
    yield axis
    axis.set(**labels)
    axis.grid(alpha=0.3)
    axis.legend(title=legend)
    save_figure(figure, path)
