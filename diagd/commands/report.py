"""Turn an evaluation into one HTML page and Markdown: tables, plots, strips of frames, videos.

Needs no model. Everything on the page is computed from results.jsonl, whose run lines
(options, commit, device, seed, hashes of weights) are printed at its end.

    diagd report --results work/study --out docs/results/study
"""

import json
from pathlib import Path
from typing import Any

from diagd.console import make_console
from diagd.evaluation.comparison import DIFFERENCES, Comparison, compare
from diagd.evaluation.options import ReportOptions
from diagd.evaluation.results import RASTER, RESULTS_FILE, Groups, Results, grouped, read_results
from diagd.evaluation.tables import MODEL, STRATEGY, Table
from diagd.files import write_text
from diagd.reporting.page import Section, as_markdown, as_page, example_sections
from diagd.reporting.plots import plot_drift, plot_frontier, plot_horizons


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
