"""Tables shaped like the paper's (arXiv:2503.14070, tables 1 to 3), as Markdown and as HTML."""

import html
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diagd.evaluation.results import BASELINES, RASTER

Row = dict[str, Any]

MISSING = "n/a"
NAMES = {
    "raster": "NTP (raster)",
    "reconstruction": "tokenizer reconstruction",
    "copy": "copy of the last given frame",
}


@dataclass(frozen=True)
class TextTable:
    """Header and cells of a table, and which (row, column) to print in bold."""

    header: list[str]
    cells: list[list[str]]
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class _Column:
    title: str
    number: Callable[[Row], float | None]
    text: Callable[[Row], str]
    best: Callable[[list[float]], float]  # min or max


def algorithm(method: str) -> str:
    """Return the paper's words for a method."""
    return NAMES.get(method, f"DiagD {method}" if method.startswith("k=") else method)


def has_tokens(rows: list[Row]) -> bool:
    """Return whether tokens were kept, so that strategies can be compared token by token."""
    return any(row["fed_per_token"] is not None for row in rows)


def main_table(rows: list[Row]) -> TextTable:
    """Lay out quality, FPS, throughput, steps and agreement; the best of each model is bold."""
    columns = [
        _distance("FVD↓", "fvd", 0),
        _distance("TFD↓", "tfd", 3),
        _quality("LPIPS↓", "lpips", 3, min),
        _quality("SSIM↑", "ssim", 3, max),
        _quality("PSNR↑", "psnr", 2, max),
        _speed("FPS↑", "frames_per_second", "{:.2f}", max),
        _speed("TP↑", "tokens_per_second", "{:.0f}", max),
        _speed("STEP↓", "num_steps", "{:.0f}", min),
    ]
    if has_tokens(rows):
        columns += [
            _speed("FED↓", "fed_per_token", "{:.2f}", min),
            replace(_speed("= raster", "equal_to_raster", "{:.1%}", max), number=lambda _: None),
        ]
    cells, bold = [], set()
    for number, row in enumerate(rows):
        cells.append(
            [row["model"], algorithm(row["method"]), str(row["clips"])]
            + [column.text(row) for column in columns]
        )
        rivals = [r for r in rows if r["model"] == row["model"] and r["method"] not in BASELINES]
        for place, column in enumerate(columns, start=3):
            values = [v for v in map(column.number, rivals) if v is not None]
            contested = row in rivals and len(set(values)) > 1
            if contested and column.number(row) == column.best(values):
                bold.add((number, place))
    header = ["Model", "Algorithm", "clips", *(column.title for column in columns)]
    return TextTable(header, cells, frozenset(bold))


def difference_table(rows: list[Row]) -> TextTable:
    """Lay out paired differences to raster of the same model, and the gain in speed."""
    metrics = [m for m in ("psnr", "ssim", "lpips") if any(row[m] for row in rows)]
    raster = {row["model"]: row for row in rows if row["method"] == RASTER}
    cells = []
    for row in rows:
        if row["method"] == RASTER or row["model"] not in raster:
            continue
        line = [row["model"], algorithm(row["method"])]
        for metric in metrics:
            line.append(_signed(row[metric], 2 if metric == "psnr" else 4))
        for name in ("frames_per_second", "num_steps"):
            ours, theirs = row[name], raster[row["model"]][name]
            if name == "num_steps" and ours:
                ours, theirs = theirs, ours
            line.append(f"{ours / theirs:.2f}x" if ours and theirs else "-")
        cells.append(line)
    header = ["Model", "Algorithm", *(f"Δ{m.upper()}" for m in metrics), "speedup", "fewer steps"]
    return TextTable(header, cells)


def markdown(table: TextTable) -> str:
    """Write a table as Markdown."""
    lines = [table.header, ["---"] * 2 + ["---:"] * (len(table.header) - 2)]
    for number, cells in enumerate(table.cells):
        lines.append([f"**{c}**" if (number, i) in table.bold else c for i, c in enumerate(cells)])
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


def as_html(table: TextTable) -> str:
    """Write a table as HTML; where the first column changes, a line is drawn."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in table.header)
    body, before = [], None
    for number, cells in enumerate(table.cells):
        marked = "".join(
            f"<td{' class=best' if (number, i) in table.bold else ''}>{_cell(cell)}</td>"
            for i, cell in enumerate(cells)
        )
        body.append(f"<tr{' class=first' if cells[0] != before else ''}>{marked}</tr>")
        before = cells[0]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(text: str) -> str:
    """Put an interval in brackets on a line of its own, in small print."""
    mean, bracket, interval = html.escape(text).partition(" [")
    return f"{mean}<br><small>[{interval}</small>" if bracket else mean


def _quality(title: str, name: str, digits: int, best: Callable[[list[float]], float]) -> _Column:
    def text(row: Row) -> str:
        if row[name] is None:
            return MISSING
        interval = row[name]["interval"]
        spread = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else ""
        return f"{row[name]['mean']:.{digits}f}{spread}"

    return _Column(title, lambda row: row[name]["mean"] if row[name] else None, text, best)


def _distance(title: str, name: str, digits: int) -> _Column:
    def number(row: Row) -> float | None:
        return row[name]["value"] if row[name] else None

    def text(row: Row) -> str:
        value = number(row)
        return MISSING if value is None else f"{value:.{digits}f}"

    return _Column(title, number, text, min)


def _speed(title: str, name: str, form: str, best: Callable[[list[float]], float]) -> _Column:
    def text(row: Row) -> str:
        return "-" if row[name] is None else form.format(row[name])

    return _Column(title, lambda row: row[name], text, best)


def _signed(value: dict[str, Any] | None, digits: int) -> str:
    if value is None or value["difference"] is None:
        return "-"
    interval = value["difference_interval"]
    spread = f" [{interval[0]:+.{digits}f}, {interval[1]:+.{digits}f}]" if interval else ""
    return f"{value['difference']:+.{digits}f}{spread}"
