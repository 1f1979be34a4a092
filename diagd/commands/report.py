"""Turn an evaluation into one HTML page and Markdown: tables, plots, strips of frames, videos.

Needs no model and no torch. Everything on the page is computed from results.jsonl, whose run lines
(options, commit, device, seed, hashes of weights) are printed at its end.

    diagd report --results work/study --out docs/results/study
"""

import json
from pathlib import Path
from typing import Any

from diagd.console import make_console
from diagd.evaluation.captions import metric_notes
from diagd.evaluation.drift import drift_cells, drift_notes, is_drift, summarize_drift
from diagd.evaluation.options import ReportOptions
from diagd.evaluation.results import (
    RESULTS_FILE,
    Groups,
    Record,
    Results,
    grouped,
    read_results,
    summarize,
)
from diagd.evaluation.revisit import (
    is_revisit,
    revisit_cells,
    revisit_notes,
    summarize_revisit,
)
from diagd.files import write_text
from diagd.reporting.page import Section, as_markdown, as_page, example_sections
from diagd.reporting.plots import plot_drift, plot_frontier, plot_horizons
from diagd.reporting.tables import TextTable, difference_table, has_tokens, main_table


def main(options: ReportOptions) -> dict[str, Any]:
    """Write the files and return their names with the rows of the table."""
    results = read_results(options.results / RESULTS_FILE)
    if not any(record["quality"] for record in results.clips):
        raise ValueError(f"{options.results / RESULTS_FILE} holds no measured clips yet")
    out = options.out or options.results
    (out / "figures").mkdir(parents=True, exist_ok=True)
    groups = grouped(results)
    if is_drift(results):
        rows = summarize_drift(results)
        measured = [_drift_section(results, rows, out)]
    elif is_revisit(results):
        rows = summarize_revisit(results)
        measured = [_revisit_section(results, rows, groups, out)]
    else:
        rows = summarize(results)
        measured = _quality_sections(results, rows, groups, out)
    sections = [
        *measured,
        *example_sections(options.results, out, groups, options.examples),
        Section(
            "Where these numbers come from",
            _origin(results),
            code="\n".join(map(_command, results.runs)),
        ),
    ]
    lead = _lead(results)
    for name, text in (
        ("report.html", as_page(options.title, lead, sections)),
        ("report.md", as_markdown(options.title, lead, sections)),
    ):
        write_text(out / name, text)
    make_console().print(f"wrote {out / 'report.html'} and {out / 'report.md'}")
    return {"page": str(out / "report.html"), "markdown": str(out / "report.md"), "rows": rows}


def _quality_sections(
    results: Results, rows: list[dict[str, Any]], groups: Groups, out: Path
) -> list[Section]:
    """Compare strategies with the truth and with raster, in tables and plots."""
    plot_frontier(rows, out / "figures" / "frontier.png")
    plot_horizons(groups, out / "figures" / "horizons.png")
    return [
        Section("Quality and speed", _reading(results, rows), main_table(rows)),
        Section("Against raster", _PAIRED, difference_table(rows)),
        Section(
            "Speed against quality",
            _FRONTIER,
            figures={"figures/frontier.png": "Speed against quality."},
        ),
        Section(
            "Quality by horizon",
            figures={
                "figures/horizons.png": "Mean over clips, frame by frame after the given ones."
            },
        ),
    ]


def _drift_section(results: Results, rows: list[dict[str, Any]], out: Path) -> Section:
    """Show how frames change while a dream goes on."""
    plot_drift(rows, out / "figures" / "drift.png")
    header, cells = drift_cells(rows)
    lines = [[row["model"], *line] for row, line in zip(rows, cells, strict=True)]
    return Section(
        "Drift",
        "\n\n".join(drift_notes(results, rows)),
        TextTable(["Model", *header], lines),
        {"figures/drift.png": "Means over clips, by eights of frames after the given ones."},
    )


def _revisit_section(
    results: Results, rows: list[dict[str, Any]], groups: Groups, out: Path
) -> Section:
    """Show whether the picture is there again when one turns back."""
    plot_horizons(groups, out / "figures" / "revisit.png")
    header, cells = revisit_cells(rows)
    lines = [[row["model"], *line] for row, line in zip(rows, cells, strict=True)]
    return Section(
        "Away and back",
        "\n\n".join(revisit_notes(results)),
        TextTable(["Model", *header], lines),
        {"figures/revisit.png": "Likeness to the last given frame, mean over clips."},
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
    actions = "the recorded actions" + ", over again where a clip ends" * is_drift(results)
    if is_revisit(results):
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


def _reading(results: Results, rows: list[dict[str, Any]]) -> str:
    """Say how to read the table, and what is not in it and why."""
    parts = [
        "Means over clips and generated frames; brackets are 95% bootstrap intervals over clips. "
        "FPS, TP (tokens a second) and STEP are medians over clips of decoding alone. NTP is "
        "next-token prediction; DiagD k=K finishes a frame before the next one begins unless a "
        "frame lag d is named."
    ]
    if has_tokens(rows):
        parts.append(
            "FED is the tokens fed for each that was written (median over clips). = raster is the "
            "share of tokens equal to raster's on the same clip with the same seed. exact and "
            "jacobi write raster's tokens; sjd and mc-sjd draw from raster's distribution with "
            "other noise, so they share few tokens with it and lose nothing."
        )
    parts += metric_notes(results, rows)
    return "\n\n".join(parts)


def _origin(results: Results) -> str:
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
    return "\n\n".join(parts)


def _command(run: Record) -> str:
    """Return all options of a run as JSON."""
    return json.dumps({"run": run["run"], "options": run["options"]}, indent=1)
