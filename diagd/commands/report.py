"""Turn an evaluation into one HTML page and Markdown: tables, plots, strips of frames, videos.

Needs no model. Everything on the page is computed from results.jsonl, whose run lines
(options, commit, device, seed, hashes of weights) are printed at its end.

    diagd report --results work/study --out docs/results/study
"""

import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagd.console import make_console
from diagd.data.video import read_video
from diagd.evaluation.comparison import DIFFERENCES, Comparison, compare
from diagd.evaluation.options import ReportOptions
from diagd.evaluation.results import (
    RASTER,
    RESULTS_FILE,
    Groups,
    Record,
    Results,
    file_name,
    grouped,
    read_results,
)
from diagd.evaluation.tables import MODEL, STRATEGY, Table
from diagd.files import write_text
from diagd.reporting.plots import (
    plot_drift,
    plot_frontier,
    plot_horizons,
    write_side_by_side,
    write_strip,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6b7280; --line: #d8dbe0;
  --page: #ffffff; --tint: #f3f4f6; --accent: #0b6e4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7e9; --soft: #9aa1ab; --line: #3a3f47;
  --page: #16181b; --tint: #22262b; --accent: #5fd3a5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 2rem auto 4rem; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .25rem; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
p.lead, figcaption, .note { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); } tr.first td { border-top: 1px solid var(--line); }
td { vertical-align: top; } small { color: var(--soft); font-weight: 400; }
td.best { font-weight: 700; color: var(--accent); }
figure { margin: 1rem 0 2rem; } img, video { max-width: 100%; border-radius: 4px; }
img { background: #fff; }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; font-size: .8rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
"""


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, a table, pictures and videos (path -> caption), and JSON."""

    title: str
    text: list[str] = field(default_factory=list)
    table: Table | None = None
    figures: dict[str, str] = field(default_factory=dict)
    videos: dict[str, str] = field(default_factory=dict)
    code: str = ""


def as_markdown(title: str, lead: str, sections: list[Section]) -> str:
    parts = [f"# {title}", lead]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        if section.table:
            parts.append(section.table.markdown())
        parts += [f"![{caption}]({path})" for path, caption in section.figures.items()]
        if section.videos:
            links = [f"- [{caption}]({path})" for path, caption in section.videos.items()]
            parts.append("\n".join(links))
        if section.code:
            parts.append(f"```json\n{section.code}\n```")
    return "\n\n".join(parts) + "\n"


def as_page(title: str, lead: str, sections: list[Section]) -> str:
    """Write the report as one HTML page; pictures and videos are named by relative paths."""
    parts = [f"<h1>{html.escape(title)}</h1><p class=lead>{html.escape(lead)}</p>"]
    for section in sections:
        parts.append(f"<section><h2>{html.escape(section.title)}</h2>")
        parts += [f"<p class=note>{html.escape(paragraph)}</p>" for paragraph in section.text]
        if section.table:
            parts.append(f"<div class=scroll>{section.table.html()}</div>")
        for path, caption in {**section.figures, **section.videos}.items():
            source, words = html.escape(path, quote=True), html.escape(caption)
            content = f'<img src="{source}" alt="{words}" loading=lazy>'
            if path in section.videos:
                flags = "controls loop muted playsinline preload=metadata"
                content = f'<video src="{source}" {flags}></video>'
            parts.append(f"<figure>{content}<figcaption>{words}</figcaption></figure>")
        if section.code:
            code = html.escape(section.code)
            parts.append(f"<details><summary>JSON</summary><pre>{code}</pre></details>")
        parts.append("</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


HIDDEN = ("copy", "reconstruction", "chance")  # in numbers only


def example_sections(folder: Path, out: Path, groups: Groups, count: int) -> list[Section]:
    """Draw the first clips by name, from a folder of results to the report's, a section each."""
    kept: dict[str, list[Record]] = {}
    for (_, strategy), lines in groups.items():
        for clip, record in lines.items():
            if record["video"] and strategy not in HIDDEN:
                kept.setdefault(clip, []).append(record)
    return [_section(folder, out, clip, kept[clip]) for clip in sorted(kept)[:count]]


def _section(folder: Path, out: Path, clip: str, records: list[Record]) -> Section:
    """Draw one clip: the truth of each model, then its strategies; a video for each model."""
    models = list(dict.fromkeys(record["model"] for record in records))
    strip, videos = {}, {}
    (out / "videos").mkdir(exist_ok=True)
    for model in models:
        own = [record for record in records if record["model"] == model]
        cells = {}
        for record in sorted(own, key=lambda record: record["strategy"] != "truth"):
            frames = read_video(folder / record["video"]).frames.numpy()
            cells[record["strategy"]] = frames
            several = len(models) > 1 and record["strategy"] != "truth"
            strip[f"{model}\n{record['strategy']}" if several else record["strategy"]] = frames
        path = f"videos/{file_name(clip)}_{file_name(model)}.mp4"
        write_side_by_side(out / path, cells, records[0]["fps"])
        videos[path] = f"{model}: {', '.join(cells)}"
    picture = f"figures/{file_name(clip)}.png"
    write_strip(out / picture, strip)
    caption = "Frames after the given ones, the same times in every row."
    return Section(f"Example {clip}", figures={picture: caption}, videos=videos)


def main(options: ReportOptions) -> dict[str, Any]:
    """Write the files and return their names with the rows of the table."""
    results = read_results(options.results / RESULTS_FILE)
    if not any(record["quality"] for record in results.clips):
        raise ValueError(f"{options.results / RESULTS_FILE} holds no measured clips yet")
    out = options.out or options.results
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    groups, comparison = grouped(results), compare(results)
    settings = results.runs[-1]["settings"]
    notes, table = comparison.notes, comparison.table()
    if settings["drift"]:
        plot_drift(table, figures / "drift.png")
        caption = "Means over clips, by eights of frames after the given ones."
        measured = [Section("Drift", notes, table, {"figures/drift.png": caption})]
    elif settings["revisit"]:
        plot_horizons(groups, figures / "revisit.png")
        caption = "Likeness to the last given frame, mean over clips."
        measured = [Section("Away and back", notes, table, {"figures/revisit.png": caption})]
    else:
        measured = _quality_sections(comparison, groups, figures)
    runs = [{"run": run["run"], "options": run["options"]} for run in results.runs]
    sections = [
        *measured,
        *example_sections(options.results, out, groups, options.examples),
        Section(
            "Where these numbers come from",
            _origin(results),
            code="\n".join(json.dumps(run, indent=1) for run in runs),
        ),
    ]
    page, markdown, lead = out / "report.html", out / "report.md", _lead(results)
    write_text(page, as_page(options.title, lead, sections))
    write_text(markdown, as_markdown(options.title, lead, sections))
    make_console().print(f"wrote {page} and {markdown}")
    return {"page": str(page), "markdown": str(markdown), "rows": comparison.rows}


def _quality_sections(comparison: Comparison, groups: Groups, figures: Path) -> list[Section]:
    """Compare strategies with the truth and with raster, in tables and plots."""
    plot_frontier(comparison.rows, figures / "frontier.png")
    plot_horizons(groups, figures / "horizons.png")
    others = [row for row in comparison.rows if row["strategy"] != RASTER]
    frontier = {"figures/frontier.png": "Speed against quality."}
    horizons = {"figures/horizons.png": "Mean over clips, frame by frame after the given ones."}
    return [
        Section("Quality and speed", [*_READING, *comparison.notes], comparison.table()),
        Section("Against raster", [_PAIRED], Table((MODEL, STRATEGY, *DIFFERENCES), others)),
        Section("Speed against quality", [_FRONTIER], figures=frontier),
        Section("Quality by horizon", figures=horizons),
    ]


_READING = (
    "Means over clips and generated frames; brackets are 95% bootstrap intervals over clips. Speed "
    "and steps are medians over clips of decoding alone. raster is next-token prediction; k=K is "
    "diagonal decoding, which finishes a frame before the next one begins unless a frame lag d is "
    "named. reconstruction is what the tokenizer makes of the true frames, copy the last given "
    "frame.",
    "fed/token is the tokens fed for each that was written. = raster is the share of tokens equal "
    "to raster's on the same clip with the same seed. exact and jacobi write raster's tokens; sjd "
    "and mc-sjd draw from raster's distribution with other noise, so they share few tokens with it "
    "and lose nothing.",
)
_PAIRED = (
    "Mean paired difference over the same clips with the same seeds, with its 95% interval: an "
    "interval that holds 0 shows no difference at this number of clips. Speedup is in frames a "
    "second of decoding, beside how many times fewer steps there are."
)
_FRONTIER = (
    "A point is a strategy; bars are 95% intervals of the paired difference to raster; a line "
    "joins raster and the diagonals. Dots write raster's tokens; diamonds (sjd, mc-sjd) write "
    "other tokens, drawn from the same distribution; crosses write neither."
)


def _lead(results: Results) -> str:
    settings = results.runs[-1]["settings"]
    generated = settings["num_frames"] - settings["context_frames"]
    clips = len({record["clip"] for record in results.clips})
    actions = "the recorded actions" + ", over again where a clip ends" * settings["drift"]
    if settings["revisit"]:
        actions = "actions that lead away and back"
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
