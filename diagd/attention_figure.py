"""The figure of `diagd attention`: the map, what lies around a token, and the shares by layer."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from torch import Tensor

_LABELS = {
    "previous_in_row": "previous token in the row",
    "row_above": "row above, same column",
    "two_rows_above": "two rows above, same column",
    "further_up": "further up, same column",
    "previous_frame": "frame before, same place",
    "older_frames": "older frames, same place",
    "neighbours": "around these (1 row, 1 column)",
    "conditioning": "action",
    "elsewhere": "everything else",
}
_COLORS = {
    "previous_in_row": "#4c72b0",
    "row_above": "#c44e52",
    "two_rows_above": "#e08a8c",
    "further_up": "#f2c6c6",
    "previous_frame": "#55a868",
    "older_frames": "#a3d3ae",
    "neighbours": "#ccb974",
    "conditioning": "#8172b2",
    "elsewhere": "#d0d0d0",
}


def draw_attention(
    path: Path,
    title: str,
    mean_map: Tensor,
    size: tuple[int, int],
    slots_per_frame: int,
    around: list[Tensor],
    report: dict[str, Any],
) -> None:
    """Write the figure.

    Args:
        mean_map: (Q, N) attention of a frame's tokens to all before them.
        size: height and width of a frame in tokens.
        around: (2r + 1, 2r + 1) mass by offset, in the frame before and in the frame itself.
        report: what `FrameAttention.report` returns.
    """
    figure = plt.figure(figsize=(13, 11), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 12, height_ratios=[1.15, 1])
    _draw_map(figure.add_subplot(grid[0, :]), mean_map, size, slots_per_frame)
    names = ("the frame before", "the frame itself")
    for place, name, mass in zip((grid[1, :3], grid[1, 3:6]), names, around, strict=True):
        _draw_around(
            figure.add_subplot(place), mass, name, max(float(m.nan_to_num().max()) for m in around)
        )
    _draw_shares(figure.add_subplot(grid[1, 6:]), report)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    partial.rename(path)


def _draw_map(axis: Axes, mean_map: Tensor, size: tuple[int, int], slots_per_frame: int) -> None:
    """Draw the last two frames' columns, and name the diagonals at their ends."""
    width = size[1]
    count = len(mean_map)
    shown = mean_map[:, -count - slots_per_frame :]
    high = float(shown.flatten().quantile(0.9995))
    axis.imshow(
        shown.clamp(min=high / 1000),
        norm=LogNorm(high / 1000, high),
        cmap="magma",
        aspect="auto",
        interpolation="nearest",
    )
    for start in (0, slots_per_frame):
        for row in range(0, count + 1, width):
            axis.axvline(start + row - 0.5, color="white", linewidth=0.2, alpha=0.4)
    axis.axvline(slots_per_frame - 0.5, color="white", linewidth=1.5)
    marks = {
        "previous_frame": 0,
        "row_above": slots_per_frame - width,
        "previous_in_row": slots_per_frame - 1,
    }
    for row, (kind, offset) in enumerate(marks.items()):
        at = count * (0.25 + 0.25 * row)
        axis.annotate(
            _LABELS[kind],
            xy=(at + offset, at),
            xytext=(
                at + offset + (70 if kind != "row_above" else -230),
                at - 25 if kind != "row_above" else at + 25,
            ),
            color="white",
            fontsize=9,
            arrowprops={"arrowstyle": "->", "color": "white"},
        )
    axis.set(
        xlabel="token looked at: the frame before | the frame itself (raster order)",
        ylabel="token written",
    )


def _draw_around(axis: Axes, mass: Tensor, name: str, high: float) -> None:
    reach = len(mass) // 2
    image = axis.imshow(
        mass,
        norm=LogNorm(high / 300, high),
        cmap="magma",
        extent=(-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5),
    )
    axis.set_facecolor("#e8e8e8")
    axis.plot(0, 0, marker="s", markersize=9, markerfacecolor="none", markeredgecolor="cyan")
    axis.set(
        title=f"attention around the place written:\n{name}",
        xlabel="columns away",
        ylabel="rows away",
    )
    axis.figure.colorbar(image, ax=axis, shrink=0.6, label="attention a token")


def _draw_shares(axis: Axes, report: dict[str, Any]) -> None:
    rows = {"if even": report["shares_if_even"], "all layers": report["shares"]}
    rows |= {f"layer {n}": layer["shares"] for n, layer in enumerate(report["layers"])}
    left = [0.0] * len(rows)
    for kind, label in _LABELS.items():
        shares = [row[kind] for row in rows.values()]
        if any(shares):
            axis.barh(list(rows), shares, left=left, color=_COLORS[kind], label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(xlim=(0, 1), xlabel="share of attention", title="whom attention goes to")
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8, frameon=False)
