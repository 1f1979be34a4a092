"""`diagd attention`: measure, draw the figure, print and write the numbers.

diagd attention                # the bundled model and its prompt
diagd attention --clips work/doom/heldout --layer 3
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from diagd.console import make_console, print_table
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.evaluation.options import AttentionOptions
from diagd.families.checkpoints import find_model
from diagd.families.clip_files import find_clips
from diagd.files import save_figure, write_json
from diagd.models.attention import attend
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import read_scene
from diagd.pipeline.world_folder import WorldSource

# layer, first query, probabilities (B, heads, L, M) float32 of L queries over the tokens [0, M)
Sink = Callable[[int, int, Tensor], None]

# Relations of a token to the one that is written; the first that holds counts: label and colour
KINDS = {
    "previous_in_row": ("previous token in the row", "#4c72b0"),  # (t, i, j - 1)
    "row_above": ("row above, same column", "#c44e52"),  # (t, i - 1, j)
    "two_rows_above": ("two rows above, same column", "#e08a8c"),  # (t, i - 2, j)
    "further_up": ("further up, same column", "#f2c6c6"),  # three rows above or more
    "previous_frame": ("frame before, same place", "#55a868"),  # (t - 1, i, j)
    "older_frames": ("older frames, same place", "#a3d3ae"),  # two frames before or more
    "conditioning": ("action", "#8172b2"),
    "neighbours": ("around these (1 row, 1 column)", "#ccb974"),  # in this frame or the one before
    "elsewhere": ("everything else", "#d0d0d0"),
}
ROW_LAGS = (1, 2, 4)
_LAG_NAMES = [f"k={lag}" for lag in ROW_LAGS]


@torch.no_grad()
def capture_attention(
    model: Transformer, tokens: Tensor, first: int, sink: Sink, chunk: int = 64
) -> None:
    """Run (B, N) int64 tokens causally, and forward the attention of those from `first` on.

    A fused kernel never holds its probabilities. This one computes those of a chunk of queries, in
    each layer one after the other, and calls the sink for each.
    """
    length = tokens.shape[1]
    if not 0 <= first < length <= model.max_positions:
        raise ValueError(
            f"expected 0 <= first < tokens <= max_positions={model.max_positions}, "
            f"got first {first} of {length} tokens"
        )
    layers, config = itertools.count(), model.config
    places = torch.arange(length, device=model.device)

    def kernel(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layer, group = next(layers), queries.shape[1] // keys.shape[1]
        slides = layer in config.sliding_layers
        reach = config.sliding_window if slides else length
        columns = keys.repeat_interleave(group, dim=1).float().transpose(2, 3)
        for start in range(first, length, chunk):
            end = min(start + chunk, length)
            scores = queries[:, :, start:end].float() @ columns[..., :end] / keys.shape[3] ** 0.5
            distance = places[start:end, None] - places[:end]
            hidden = (distance < 0) | (distance >= reach)
            sink(layer, start, scores.masked_fill(hidden, -torch.inf).softmax(-1))
        near = (places[:, None] - places < reach).tril() if slides else None
        return attend(queries, keys, values, near)

    model.forward(tokens, attends=(kernel, kernel), logits_to_keep=1)


@dataclass(frozen=True)
class FrameAttention:
    """Attention of the tokens of one frame: Q = height * width queries over N tokens."""

    height: int
    width: int
    frame: int  # counted from 0
    slots_per_frame: int  # its tokens and the actions after them
    # (Q, N) float32: a row is a token written, a column a token attended to; the mean over clips
    # and the layers and heads asked for
    mean_map: Tensor
    shares: Tensor  # (layers, heads, kinds) float32, attention mass by `KINDS`; sums to 1
    # (layers, heads, row lags) float32, mass on tokens that diagonals with the lags `ROW_LAGS` have
    # not written yet
    hidden: Tensor
    even_shares: Tensor  # (kinds,), if every visible token got the same attention
    even_hidden: Tensor  # (row lags,), likewise

    def report(self) -> dict[str, Any]:
        """Return the numbers as plain data: over all, by layer, by layer and head."""
        return {
            "frame": self.frame,
            "grid": f"{self.height}x{self.width}",
            "shares": _named(KINDS, self.shares.mean((0, 1))),
            "shares_if_even": _named(KINDS, self.even_shares),
            "not_written_yet": _named(_LAG_NAMES, self.hidden.mean((0, 1))),
            "not_written_yet_if_even": _named(_LAG_NAMES, self.even_hidden),
            "layers": [
                {
                    "shares": _named(KINDS, shares.mean(0)),
                    "not_written_yet": _named(_LAG_NAMES, hidden.mean(0)),
                    "heads": [_named(KINDS, head) for head in shares],
                }
                for shares, hidden in zip(self.shares, self.hidden, strict=True)
            ],
        }

    def around(self, frames_back: int, reach: int) -> Tensor:
        """Return the mean mass at row and column offsets -reach .. reach from the token written.

        (2 * reach + 1, 2 * reach + 1) float32; NaN at offsets that no attended token has.
        """
        count, size = self.height * self.width, 2 * reach + 1
        end = self.mean_map.shape[1] - frames_back * self.slots_per_frame
        mass = self.mean_map[:, end - count : end]
        if frames_back == 0:
            is_later = torch.ones(count, count, dtype=torch.bool).triu()
            mass = mass.masked_fill(is_later, torch.nan)
        frames = F.pad(mass.unflatten(1, (self.height, self.width)), (reach,) * 4, value=torch.nan)
        places = itertools.product(range(self.height), range(self.width))
        near = [f[i : i + size, j : j + size] for f, (i, j) in zip(frames, places, strict=True)]
        return torch.stack(near).nanmean(0)


def _named(names: Iterable[str], masses: Tensor) -> dict[str, float]:
    return {name: round(mass, 5) for name, mass in zip(names, masses.tolist(), strict=True)}


def measure_attention(
    model: Transformer,
    tokens: Tensor,
    height: int,
    width: int,
    frame: int = 1,
    *,
    num_action_tokens: int = 0,
    layer: int | None = None,
    head: int | None = None,
    chunk: int = 64,
) -> FrameAttention:
    """Measure the attention of the lanes that predict a frame, one clip after the other.

    Args:
        tokens: (B, N) int64, a clip a row: frame, actions, frame ... in raster order, no actions
            before the first frame; tokens after `frame` are ignored.
        layer, head: which to show in `mean_map`; None is the mean. The shares are of all.
        chunk: queries at a time.
    """
    size = height * width
    start = frame * (size + num_action_tokens)
    if tokens.ndim != 2 or start < 1 or tokens.shape[1] < start + size:
        raise ValueError(
            f"frame {frame} of {height}x{width} takes tokens [{start}, {start + size}) and one "
            f"before, got tokens of shape {tuple(tokens.shape)}"
        )
    layers, heads = model.config.num_layers, model.config.num_heads
    for name, chosen, count in (("layer", layer, layers), ("head", head, heads)):
        if chosen is not None and not 0 <= chosen < count:
            raise ValueError(f"{name} must be in [0, {count}), got {chosen}")
    classes = _classes(height, width, frame, num_action_tokens)
    mean_map = torch.zeros(size, start + size)
    masses = torch.zeros(layers, heads, len(classes))

    def add(at: int, query: int, probabilities: Tensor) -> None:
        mean = probabilities[0].cpu() / len(tokens)  # (heads, L, M), a part of that over clips
        rows = slice(query - start + 1, query - start + 1 + mean.shape[1])
        seen = mean.shape[2]
        masses[at] += mean.flatten(1) @ classes[:, rows, :seen].flatten(1).float().T
        if layer in (None, at):
            mean_map[rows, :seen] += mean.mean(0) if head is None else mean[head]

    for clip in tokens[:, : start + size - 1].split(1):
        capture_attention(model, clip, start - 1, add, chunk)
    even = torch.ones(size, start + size).tril(start - 1)
    even /= even.sum(1, keepdim=True)
    parts = len(KINDS), len(ROW_LAGS)
    shares, hidden = (masses / size).split(parts, -1)
    even_shares, even_hidden = ((classes * even).sum((1, 2)) / size).split(parts)
    mean_map /= layers if layer is None else 1
    place = height, width, frame, size + num_action_tokens
    return FrameAttention(*place, mean_map, shares, hidden, even_shares, even_hidden)


def _classes(height: int, width: int, frame: int, num_actions: int) -> Tensor:
    """Classify every token for every token of a frame: (kinds + row lags, Q, N) bool.

    One of the kinds is true of each; of the row lags, those whose diagonals have yet to write it.
    """
    own = torch.arange(height * width)[:, None]
    slots_per_frame = height * width + num_actions
    slots = torch.arange((frame + 1) * slots_per_frame - num_actions)
    cell, frames_back = slots % slots_per_frame, frame - slots // slots_per_frame
    up, left = own // width - cell // width, own % width - cell % width
    is_same_place = (up == 0) & (left == 0)
    is_above = (frames_back == 0) & (left == 0)
    holds = torch.stack(
        [
            (frames_back == 0) & (up == 0) & (left == 1),
            is_above & (up == 1),
            is_above & (up == 2),
            is_above & (up > 2),
            (frames_back == 1) & is_same_place,
            (frames_back > 1) & is_same_place,
            (cell >= height * width).expand_as(up),  # actions follow a frame's tokens
            (frames_back <= 1) & (up.abs() <= 1) & (left.abs() <= 1),
            torch.ones_like(is_same_place),
        ]
    )
    kinds = holds.int().argmax(0) == torch.arange(len(KINDS)).view(-1, 1, 1)
    grid = TokenGrid(1, height, width)
    earlier = torch.ones(height * width, height * width, dtype=torch.bool).tril(-1)
    late = []
    for lag in ROW_LAGS:
        step_of = DiagonalSchedule.spatial(grid, min(lag, width)).step_of
        steps = torch.tensor([step_of(0, i, j) for i in range(height) for j in range(width)])
        late.append(earlier & (steps[None] >= steps[:, None]))
    return torch.cat([kinds, F.pad(torch.stack(late), (kinds.shape[2] - height * width, 0))])


REACH = 6  # rows and columns around a place that the figure shows


def report_attention(options: AttentionOptions) -> dict[str, Any]:
    """Measure, draw, print and write the numbers; return them and where they went."""
    found = find_model(options.model)
    config, defaults = found.config, found.defaults
    if config.prefix_length or config.context_size or not defaults.context_frames:
        raise ValueError(
            "attention is measured without a text, in sequences that begin with a frame, which "
            f"those of {options.model} do not"
        )
    if options.frame >= (held := config.frames_held):
        raise ValueError(f"frame must be in [1, {held}), the model's frames, got {options.frame}")
    world = VideoGenerator.from_pretrained(
        options.model, options.device, "float32", "eager", tokenizer=options.tokenizer
    )
    model = world.model
    assert isinstance(model, Transformer)
    clips = [options.clips or WorldSource(options.model).folder / "prompt.mp4"]
    if clips[0].is_dir():
        clips = [clip.path for clip in find_clips(clips[0]).values()][: options.num_clips]
    tokens, num_frames = list[Tensor](), 1 + options.frame * world.tokenizer.temporal_compression
    for clip in clips:
        scene = read_scene(clip, world, num_frames)
        if (count := len(scene.frames)) < num_frames:
            raise ValueError(f"{clip} has {count} frames, expected at least {num_frames}")
        tokens.append(world.prompt(scene.frames, scene.actions)[0])
    attention = measure_attention(
        model,
        torch.cat(tokens),
        config.grid_height,
        config.grid_width,
        options.frame,
        num_action_tokens=config.num_action_tokens,
        layer=options.layer,
        head=options.head,
    )
    layer = "mean of all layers" if options.layer is None else f"layer {options.layer}"
    head = "all heads" if options.head is None else f"head {options.head}"
    title = f"{options.model}, frame {options.frame + 1} of {len(clips)} clip(s), {layer}, {head}"
    draw_attention(options.output, title, attention)
    numbers = options.output.with_suffix(".json")
    names = [clip.name for clip in clips]
    report = {"model": options.model, "clips": names, "kinds": list(KINDS), **attention.report()}
    write_json(numbers, report, indent=1)
    both = {kind: (report["shares"][kind], report["shares_if_even"][kind]) for kind in KINDS}
    lines = [
        [kind.replace("_", " "), f"{share:.1%}", f"{even:.1%}", f"{share / even:.1f}"]
        for kind, (share, even) in both.items()
        if even
    ]
    console = make_console()
    header = "", "measured", "if it were even", "times even"
    print_table(console, f"{options.model}: share of attention, all layers", header, lines)
    lost = ", ".join(f"{mass:.1%} ({k})" for k, mass in report["not_written_yet"].items())
    console.print(f"on tokens that diagonals have not written yet: {lost}")
    console.print(f"wrote {options.output} and {numbers}")
    return {"figure": str(options.output), "numbers": str(numbers), **report}


def draw_attention(path: Path, title: str, attention: FrameAttention) -> None:
    figure = Figure(figsize=(14, 11.5), layout="constrained")
    axes = figure.subplot_mosaic(
        [["map", "map", "map"], ["before", "itself", "shares"]],
        width_ratios=[1, 1, 1.7],
        height_ratios=[1.25, 1],
    )
    figure.suptitle(title)
    _draw_map(axes["map"], attention)
    around = {"before": attention.around(1, REACH), "itself": attention.around(0, REACH)}
    high = max(float(mass.nan_to_num().max()) for mass in around.values())
    edges = (-REACH - 0.5, REACH + 0.5, REACH + 0.5, -REACH - 0.5)
    for name, mass in around.items():
        axis, norm = axes[name], LogNorm(high / 300, high)
        axis.imshow(mass.numpy(), norm=norm, cmap="magma", extent=edges)
        axis.set_facecolor("#e8e8e8")
        axis.plot(0, 0, "s", markersize=13, markerfacecolor="none", markeredgecolor="cyan")
        ticks = range(-REACH, REACH + 1, 2)
        axis.set(xlabel="columns away", ylabel="rows away", xticks=ticks, yticks=ticks)
        axis.set_title(f"around the token written (box),\nin the frame {name}")
    image, nearby = axes["itself"].images[0], [axes[name] for name in around]
    figure.colorbar(image, ax=nearby, location="bottom", shrink=0.7, label="attention a token")
    report, axis = attention.report(), axes["shares"]
    rows = {"if it were even": report["shares_if_even"], "all layers": report["shares"]}
    rows |= {f"layer {n}": layer["shares"] for n, layer in enumerate(report["layers"])}
    left = [0.0] * len(rows)
    for kind, (label, color) in KINDS.items():
        shares = [row[kind] for row in rows.values()]
        if any(shares):
            axis.barh(list(rows), shares, left=left, color=color, label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(xlim=(0, 1), xlabel="share of attention", title="share of attention by kind of token")
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8, frameon=False)
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
        axis.annotate(KINDS[kind][0], xy=place, xytext=label_at, **look)
    axis.set_xlabel("token attended to: the frame before | the frame itself, both in raster order")
    axis.set_ylabel("token written, in raster order")
