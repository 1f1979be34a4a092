"""Turn an evaluation into one HTML page and Markdown: tables, plots, strips of frames, videos.

Needs no model. Everything on the page is computed from results.jsonl, whose run lines
(options, commit, device, seed, hashes of weights) are printed at its end.

    diagd report --results work/study --out docs/results/study
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, select_autoescape
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from PIL import Image, ImageDraw
from torch import Tensor

from diagd.console import make_console
from diagd.data.video import contact_sheet, read_video, write_video
from diagd.evaluation.comparison import (
    DIFFERENCES,
    METRICS,
    STRATEGY,
    Column,
    Groups,
    Row,
    Table,
    compare,
    grouped,
    per_horizon,
)
from diagd.evaluation.options import CONTINUATION, DRIFT, REVISIT, ReportOptions
from diagd.evaluation.results import (
    BASELINES,
    RASTER,
    RESULTS_FILE,
    Record,
    Results,
    read_results,
    unique_name,
)
from diagd.files import save_figure, write_text

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html"]),
    keep_trailing_newline=True,
)
STRIP_COLUMNS, VIDEO_COLUMNS = 8, 3
CELL_HEIGHT_PX = 200  # small frames are enlarged by whole factors up to about this
LABEL_HEIGHT_PX = 24


def write_strip(path: Path, rows: dict[str, Tensor]) -> None:
    """Draw frames of each video, (T, H_px, W_px, 3) uint8, at the same times, in a labelled row."""
    length = min(len(frames) for frames in rows.values())
    times = np.unique(np.linspace(0, length - 1, min(length, STRIP_COLUMNS)).round().astype(int))
    height_px, width_px = next(iter(rows.values())).shape[1:3]
    cell = 1.5 * width_px / height_px, 1.5
    size = cell[0] * len(times) + 1.2, cell[1] * len(rows) + 0.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(times), squeeze=False)
    for line, (label, frames) in zip(axes, rows.items(), strict=True):
        for axis, time in zip(line, times, strict=True):
            axis.imshow(frames[time].numpy())
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, fontsize=13)
    for axis, time in zip(axes[0], times, strict=True):
        axis.set_title(f"frame {time + 1}", fontsize=13)
    save_figure(figure, path, dpi=80)


def write_side_by_side(path: Path, cells: dict[str, Tensor], fps: float) -> None:
    """Write one mp4 of all videos in a grid, a label above each."""
    height_px, width_px = next(iter(cells.values())).shape[1:3]
    factor = max(1, round(CELL_HEIGHT_PX / height_px))
    blocks = []
    for label, frames in cells.items():
        large = frames.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
        head = Image.new("RGB", (width_px * factor, LABEL_HEIGHT_PX), "white")
        middle = head.width / 2, head.height / 2
        ImageDraw.Draw(head).text(middle, label, "black", anchor="mm", font_size=12)
        above = torch.tensor(np.asarray(head)).expand(len(large), -1, -1, -1)
        blocks.append(torch.cat([above, large], dim=1))
    num_rows = -(-len(cells) // VIDEO_COLUMNS)
    columns = -(-len(cells) // num_rows)  # four are 2 + 2, not 3 + 1
    moments = zip(*blocks, strict=False)  # as long as the shortest
    sheets = [contact_sheet(torch.stack(one), columns) for one in moments]
    even_height, even_width = (size // 2 * 2 for size in sheets[0].shape[:2])
    write_video(path, torch.stack(sheets)[:, :even_height, :even_width], fps, crf=20)


MARKERS = {  # a strategy's promise -> marker, label
    "tokens": ("o", "raster's tokens"),
    "no": ("x", "other tokens"),
}
JOINED = (RASTER, "k=")
SHADES = {"chance": "0.8", "truth": "0", "reconstruction": "0.35", "copy": "0.6"}


def plot_frontier(rows: list[Row], path: Path) -> None:
    """Draw what speed costs: a colour for each model, a point for each strategy."""
    table = Table([row for row in rows if row["strategy"] not in BASELINES], METRICS)
    width = len(table.numbers)
    figure = Figure(figsize=(4.6 * width, 4), layout="constrained")
    axes = figure.subplots(1, width, squeeze=False)
    models = dict.fromkeys(row["model"] for row in table.shown)
    for axis, column in zip(axes[0], table.numbers, strict=True):
        for number, model in enumerate(models):
            own = [row for row in table.shown if row["model"] == model]
            points = [row for row in own if column.value(row) is not None]
            points.sort(key=lambda row: row["frames_per_second"])
            _draw_frontier(axis, points, column, f"C{number}", model)
        axis.set(xscale="log", xlabel="frames a second", ylabel=_axis_label(column))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.margins(x=0.15, y=0.15)
        axis.grid(alpha=0.3, which="both")
    kinds = {row["promise"] for row in table.shown}
    for kind, (marker, words) in MARKERS.items():
        if kind in kinds and len(kinds) > 1:
            axes[0, 0].plot([], [], marker, color="0.4", label=words)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * width, fontsize=8)
    save_figure(figure, path)


def _draw_frontier(axis: Any, points: list[Row], column: Column, color: str, model: str) -> None:
    """Draw the points of a model, with bars of the paired difference to raster."""
    speeds = [row["frames_per_second"] for row in points]
    values = [column.value(row) for row in points]
    bars = np.zeros((2, len(points)))
    for bar, row in zip(bars.T, points, strict=True):
        metric = row[column.key.split(".")[0]]
        if edges := metric.get("difference_interval"):
            bar[:] = metric["difference"] - edges[0], edges[1] - metric["difference"]
    axis.errorbar(speeds, values, bars.clip(min=0), fmt="none", capsize=3, lw=1, color=color)
    joined = [n for n, row in enumerate(points) if row["strategy"].startswith(JOINED)]
    line = [speeds[n] for n in joined], [values[n] for n in joined]
    axis.plot(*line, lw=1, color=color, label=model)
    for n, (row, speed, value) in enumerate(zip(points, speeds, values, strict=True)):
        axis.plot(speed, value, MARKERS[row["promise"]][0], color=color)
        up, va = ((-1, "top"), (1, "bottom"))[n % 2]  # neighbours on different sides
        style = {"textcoords": "offset points", "rotation": 30 * up, "va": va}
        axis.annotate(row["strategy"], (speed, value), (4, 5 * up), fontsize=8, **style)


def plot_horizons(groups: Groups, path: Path) -> None:
    """Draw quality frame by frame: a column for each model, a row for each metric."""
    curves: Curves = {}
    for column in METRICS:
        for (model, strategy), clips in groups.items():
            if (values := per_horizon(clips, column.key.split(".")[0])) is not None:
                curves[model, column, strategy] = list(enumerate(values.mean(axis=0), start=1))
    _draw_curves(curves, (5.5, 3.2), path)


def plot_drift(table: Table, path: Path) -> None:
    """Draw how frames change, by eights: a column for each model, a row for each number."""
    curves: Curves = {}
    for column in table.numbers:
        for row in table.shown:
            if (value := column.value(row)) is not None:
                points = curves.setdefault((row["model"], column, row["strategy"]), [])
                points.append((np.mean(row["frames"]), value))
    _draw_curves(curves, (7, 2.6), path, marker=".")


# (model, column, strategy) -> times and values
Curves = dict[tuple[str, Column, str], list[tuple[Any, Any]]]


def _draw_curves(curves: Curves, inches: tuple[float, float], path: Path, **style: Any) -> None:
    """Draw each model's curves below its name, each panel so wide and high."""
    models, columns, _ = (list(dict.fromkeys(kind)) for kind in zip(*curves, strict=True))
    size = inches[0] * len(models), inches[1] * len(columns)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(columns), len(models), squeeze=False, sharex=True, sharey="row")
    for (model, column, strategy), points in curves.items():
        axis = axes[columns.index(column), models.index(model)]
        shade = {"color": SHADES[strategy], "ls": "--"} if strategy in SHADES else {}
        axis.plot(*zip(*points, strict=True), label=strategy, lw=1.3, **style, **shade)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis, column in zip(axes[:, 0], columns, strict=True):
        axis.set_ylabel(_axis_label(column))
    for top, bottom, model in zip(axes[0], axes[-1], models, strict=True):
        top.set_title(model)
        bottom.set_xlabel("frames after the given ones")
    axes[0, 0].legend(fontsize=8)
    save_figure(figure, path)


def _axis_label(column: Column) -> str:
    return f"{column.heading} ({column.better} is better)" if column.better else column.heading


@dataclass(frozen=True)
class Section:
    """A heading, a table, paragraphs about it, pictures and videos (path -> caption), and JSON."""

    title: str
    table: Table | None = None
    text: Sequence[str] = ()
    figures: dict[str, str] = field(default_factory=dict)
    videos: dict[str, str] = field(default_factory=dict)
    code: str = ""


HIDDEN = ("copy", "reconstruction", "chance")  # in numbers only


def example_sections(folder: Path, out: Path, groups: Groups, count: int) -> list[Section]:
    """Draw the first clips by name in a section each, with a video of each model, truth first."""
    kept: dict[str, list[Record]] = {}
    for (_, strategy), lines in groups.items():
        for clip, record in lines.items():
            if record["video"] and strategy not in HIDDEN:
                kept.setdefault(clip, []).append(record)
    sections = []
    for clip, records in sorted(kept.items())[:count]:
        models = list(dict.fromkeys(record["model"] for record in records))
        strip, videos = {}, {}
        for model in models:
            own = [record for record in records if record["model"] == model]
            cells = {}
            for record in sorted(own, key=lambda record: record["strategy"] != "truth"):
                frames = read_video(folder / record["video"]).frames
                cells[record["strategy"]] = frames
                several = len(models) > 1 and record["strategy"] != "truth"
                strip[f"{model}\n{record['strategy']}" if several else record["strategy"]] = frames
            path = f"videos/{unique_name(clip)}_{unique_name(model)}.mp4"
            write_side_by_side(out / path, cells, records[0]["fps"])
            videos[path] = f"{model}: {', '.join(cells)}"
        picture = f"figures/{unique_name(clip)}.png"
        write_strip(out / picture, strip)
        figures = {picture: "Frames after the given ones, the same times in every row."}
        sections.append(Section(f"Example {clip}", figures=figures, videos=videos))
    return sections


def main(options: ReportOptions) -> dict[str, Any]:
    """Write the files and return their names with the rows of the table."""
    results = read_results(options.results / RESULTS_FILE)
    if not any(record["quality"] and record["stats"] for record in results.clips):
        raise ValueError(f"{options.results / RESULTS_FILE} holds no measured clips yet")
    out = options.out or options.results
    figures = out / "figures"
    groups, table = grouped(results), compare(results)
    measured = _SECTIONS[results.runs[-1]["mode"]](table, groups, figures)
    runs = [{"run": run["run"], "options": run["options"]} for run in results.runs]
    sections = [
        *measured,
        *example_sections(options.results, out, groups, options.examples),
        Section(
            "Where these numbers come from",
            text=_origin(results),
            code="\n".join(json.dumps(run, indent=1) for run in runs),
        ),
    ]
    parts = {"title": options.title, "lead": _lead(results), "sections": sections}
    page, markdown = out / "report.html", out / "report.md"
    for path in (page, markdown):
        write_text(path, TEMPLATES.get_template(path.name).render(parts))
    make_console().print(f"wrote {page} and {markdown}")
    return {"page": str(page), "markdown": str(markdown), "rows": table.rows}


def _drift_sections(table: Table, groups: Groups, figures: Path) -> list[Section]:
    plot_drift(table, figures / "drift.png")
    plots = {"figures/drift.png": "Means over clips, by eights of frames after the given ones."}
    return [Section("Drift", table, table.notes, plots)]


def _revisit_sections(table: Table, groups: Groups, figures: Path) -> list[Section]:
    plot_horizons(groups, figures / "revisit.png")
    plots = {"figures/revisit.png": "Likeness to the last given frame, mean over clips."}
    return [Section("Away and back", table, table.notes, plots)]


def _quality_sections(table: Table, groups: Groups, figures: Path) -> list[Section]:
    plot_frontier(table.rows, figures / "frontier.png")
    plot_horizons(groups, figures / "horizons.png")
    others = [row for row in table.rows if row["strategy"] != RASTER]
    frontier = {"figures/frontier.png": "Speed against quality."}
    horizons = {"figures/horizons.png": "Mean over clips, frame by frame after the given ones."}
    return [
        Section("Quality and speed", table, [*_READING, *table.notes]),
        Section("Against raster", Table(others, (STRATEGY, *DIFFERENCES)), [_PAIRED]),
        Section("Speed against quality", text=[_FRONTIER], figures=frontier),
        Section("Quality by horizon", figures=horizons),
    ]


_SECTIONS = {
    CONTINUATION.name: _quality_sections,
    DRIFT.name: _drift_sections,
    REVISIT.name: _revisit_sections,
}
_READING = (
    "Means over clips and generated frames; brackets are 95% bootstrap intervals over clips. Speed "
    "and steps are medians over clips of decoding alone. raster is next-token prediction; k=K is "
    "diagonal decoding, which finishes a frame before the next one begins unless a frame lag d is "
    "named. reconstruction is what the tokenizer makes of the true frames, copy the last given "
    "frame.",
    "fed/token is the tokens fed for each that was written. = raster is the share of tokens equal "
    "to raster's on the same clip with the same seed. exact and jacobi write raster's tokens.",
)
_PAIRED = (
    "Mean paired difference over the same clips with the same seeds, with its 95% interval: an "
    "interval that holds 0 shows no difference at this number of clips. Speedup is in frames a "
    "second of decoding, beside how many times fewer steps there are."
)
_FRONTIER = (
    "A point is a strategy; bars are 95% intervals of the paired difference to raster; a line "
    "joins raster and the diagonals. Dots write raster's tokens, crosses "
    "others."
)


_ACTIONS = {
    CONTINUATION.name: "the recorded actions",
    DRIFT.name: "the recorded actions, over again where a clip ends",
    REVISIT.name: "actions that lead away and back",
}


def _lead(results: Results) -> str:
    settings = results.runs[-1]["settings"]
    generated = settings["num_frames"] - settings["context_frames"]
    clips = len({record["clip"] for record in results.clips})
    actions = _ACTIONS[results.runs[-1]["mode"]]
    sampling = settings["sampling"]
    drawn = "greedy decoding"
    if sampling["temperature"]:
        cuts = (f"top-{n[-1]} {sampling[n]}" for n in ("top_k", "top_p") if sampling[n] is not None)
        drawn = ", ".join([f"sampling at temperature {sampling['temperature']:g}", *cuts])
    return (
        f"{clips} clips of {settings['num_frames']} frames: {settings['context_frames']} given, "
        f"{generated} generated under {actions}; {drawn}, seed {settings['seed']}, "
        f"batch size 1, {settings['dtype']} on {results.runs[-1]['device']}."
    )


def _origin(results: Results) -> list[str]:
    """Name commit, machine and weights of every run that added lines."""
    parts = []
    for run in results.runs:
        count = sum(record["run"] == run["run"] for record in results.clips)
        weights = ", ".join(f"{label} ({sha256})" for label, sha256 in run["models"].items())
        parts.append(
            f"Run {run['run']}: {count} lines; commit {run['commit'] or 'unknown'}; "
            f"{run['device']}, {run['threads']} threads; torch {run['torch']}, Python "
            f"{run['python']}; seed {run['settings']['seed']}; models with SHA-256 of their "
            f"files: {weights}."
        )
    return parts
