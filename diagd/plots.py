"""Draw results with matplotlib."""

import json
from pathlib import Path

import matplotlib.pyplot as plt


def plot_loss(folder: Path) -> None:
    """Draw a training run's log.jsonl as loss.png."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot([line["step"] for line in lines], [line["loss"] for line in lines], linewidth=1)
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)
    plt.close(figure)
