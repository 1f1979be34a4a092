"""`diagd attention`: measure, draw the figure, print and write the numbers.

diagd attention                # the bundled model and its prompt
diagd attention --clips work/doom/heldout --layer 3
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from diagd.attention.analysis import KINDS, FrameAttention, measure_attention
from diagd.attention.options import AttentionOptions
from diagd.backends.devices import device_of
from diagd.console import make_console, print_table
from diagd.families.checkpoints import model_path
from diagd.files import save_figure, write_json
from diagd.pipeline.generator import VideoGenerator, read_scene
from diagd.pipeline.world_folder import load_parts

REACH = 6  # rows and columns around a place that the figure shows

_STYLES = {  # label and colour of each kind of token, in the order of the bars
    "previous_in_row": ("previous token in the row", "#4c72b0"),
    "row_above": ("row above, same column", "#c44e52"),
    "two_rows_above": ("two rows above, same column", "#e08a8c"),
    "further_up": ("further up, same column", "#f2c6c6"),
    "previous_frame": ("frame before, same place", "#55a868"),
    "older_frames": ("older frames, same place", "#a3d3ae"),
    "neighbours": ("around these (1 row, 1 column)", "#ccb974"),
    "conditioning": ("action or prefix", "#8172b2"),
    "elsewhere": ("everything else", "#d0d0d0"),
}


def report_attention(options: AttentionOptions) -> dict[str, Any]:
    """Measure, draw, print and write the numbers; return them and where they went."""
    parts = load_parts(options.model, device_of(options.device))
    config = parts.model.config
    world = VideoGenerator(parts.model, config, parts.tokenizer, parts.vocabulary, parts.defaults)
    clips = _clips(options)
    attention = measure_attention(
        parts.model,
        torch.cat([_tokens(clip, options.frame + 1, world) for clip in clips]),
        config.grid_height,
        config.grid_width,
        options.frame,
        num_action_tokens=config.num_action_tokens,
        layer=options.layer,
        head=options.head,
    )
    layer = "mean of all layers" if options.layer is None else f"layer {options.layer}"
    head = "all heads" if options.head is None else f"head {options.head}"
    draw_attention(
        options.output,
        f"{options.model}, frame {options.frame + 1} of {len(clips)} clip(s), {layer}, {head}",
        attention,
    )
    numbers = options.output.with_suffix(".json")
    names = [clip.name for clip in clips]
    report = {"model": options.model, "clips": names, "kinds": list(KINDS), **attention.report()}
    write_json(numbers, report, indent=1)
    _print(report)
    make_console().print(f"wrote {options.output} and {numbers}")
    return {"figure": str(options.output), "numbers": str(numbers), **report}


def _clips(options: AttentionOptions) -> list[Path]:
    path = options.clips or model_path(options.model) / "prompt.mp4"
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.mp4"))[: options.num_clips]
    if not found:
        raise FileNotFoundError(f"no .mp4 in {path}")
    return found


def _tokens(clip: Path, num_frames: int, world: VideoGenerator) -> Tensor:
    """Return (1, N) tokens of the clip's last frames with the actions between them."""
    scene = read_scene(clip, world, num_frames)
    if (found := len(scene.frames)) < num_frames:
        raise ValueError(f"{clip} has {found} frames, expected at least {num_frames}")
    return world.prompt(scene.frames, scene.actions)[0]


def _print(report: dict[str, Any]) -> None:
    lines = []
    for kind in KINDS:
        share, even = report["shares"][kind], report["shares_if_even"][kind]
        if even:
            name = kind.replace("_", " ")
            lines.append([name, f"{share:.1%}", f"{even:.1%}", f"{share / even:.1f}"])
    console = make_console()
    header = "", "measured", "if it were even", "times even"
    print_table(console, f"{report['model']}: share of attention, all layers", header, lines)
    lost = ", ".join(f"{mass:.1%} ({k})" for k, mass in report["not_written_yet"].items())
    console.print(f"on tokens that diagonals have not written yet: {lost}")


def draw_attention(path: Path, title: str, attention: FrameAttention) -> None:
    figure = Figure(figsize=(14, 11.5), layout="constrained")
    axes = figure.subplot_mosaic(
        [["map", "map", "map"], ["before", "itself", "shares"]],
        width_ratios=[1, 1, 1.7],
        height_ratios=[1.25, 1],
    )
    figure.suptitle(title)
    _draw_map(axes["map"], attention)
    around = [attention.around(frames_back, REACH) for frames_back in (1, 0)]
    high = max(float(mass.nan_to_num().max()) for mass in around)
    nearby = [axes["before"], axes["itself"]]
    for axis, name, mass in zip(nearby, ("before", "itself"), around, strict=True):
        _draw_around(axis, mass, LogNorm(high / 300, high))
        axis.set_title(f"around the token written (box),\nin the frame {name}")
    image = axes["itself"].images[0]
    figure.colorbar(image, ax=nearby, location="bottom", shrink=0.7, label="attention a token")
    _draw_shares(axes["shares"], attention.report())
    save_figure(figure, path, dpi=110)


def _draw_map(axis: Axes, attention: FrameAttention) -> None:
    """Draw the frame before and the frame itself, and label their diagonals."""
    count, width = len(attention.mean_map), attention.width
    slots_per_frame = attention.slots_per_frame
    shown = attention.mean_map[:, -count - slots_per_frame :].numpy()
    high = float(np.quantile(shown, 0.9995))
    norm = LogNorm(high / 1000, high, clip=True)
    axis.imshow(shown, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
    axis.axvline(slots_per_frame - 0.5, color="white", linewidth=1.5)
    look = {"textcoords": "axes fraction", "color": "white", "fontsize": 11, "in_layout": False}
    look |= {"ha": "center", "arrowprops": {"arrowstyle": "->", "color": "white"}}
    look |= {"bbox": {"facecolor": "black", "alpha": 0.75, "edgecolor": "none"}}
    # kind, columns from the diagonal of the frame before, row (0 to 1), place of the label (0 to 1)
    for kind, offset, row, label_at in (
        ("previous_frame", 0, 0.25, (0.2, 0.88)),
        ("row_above", slots_per_frame - width, 0.3, (0.8, 0.88)),
        ("previous_in_row", slots_per_frame - 1, 0.45, (0.88, 0.74)),
        ("two_rows_above", slots_per_frame - 2 * width, 0.8, (0.4, 0.1)),
    ):
        place = row * count + offset, row * count
        axis.annotate(_STYLES[kind][0], xy=place, xytext=label_at, **look)
    axis.set_xlabel("token attended to: the frame before | the frame itself, both in raster order")
    axis.set_ylabel("token written, in raster order")


def _draw_around(axis: Axes, mass: Tensor, norm: LogNorm) -> None:
    reach = len(mass) // 2
    edges = (-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5)
    axis.imshow(mass.numpy(), norm=norm, cmap="magma", extent=edges)
    axis.set_facecolor("#e8e8e8")
    axis.plot(0, 0, "s", markersize=13, markerfacecolor="none", markeredgecolor="cyan")
    axis.set(xlabel="columns away", ylabel="rows away", xticks=range(-reach, reach + 1, 2))
    axis.set_yticks(range(-reach, reach + 1, 2))


def _draw_shares(axis: Axes, report: dict[str, Any]) -> None:
    rows = {"if it were even": report["shares_if_even"], "all layers": report["shares"]}
    rows |= {f"layer {n}": layer["shares"] for n, layer in enumerate(report["layers"])}
    left = [0.0] * len(rows)
    for kind, (label, color) in _STYLES.items():
        shares = [row[kind] for row in rows.values()]
        if any(shares):
            axis.barh(list(rows), shares, left=left, color=color, label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(xlim=(0, 1), xlabel="share of attention", title="share of attention by kind of token")
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8, frameon=False)
