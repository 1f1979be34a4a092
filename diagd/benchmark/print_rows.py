"""Print a benchmark as tables for the terminal."""

from typing import Any

from diagd.benchmark.disturbance import MARK, disturbed_note
from diagd.console import make_console, print_table

SPEED = {  # header and form of each; shown where a row has any
    "steps": "{steps}",
    "ms/step": "{ms_per_step:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "frames/s": "{frames_per_second:.2f}",
    "over HF": "{over_hugging_face:.1f}x",
    "speedup": "{speedup:.1f}x",
    "fed/token": "{fed_per_token:.2f}",
    "= raster": "{tokens_equal_to_raster:.0%}",
    "efficiency": "{efficiency:.2f}",
    "first s": "{warm_up_seconds:.1f}",
}
LIMITS = {
    "p99": "{step_ms[p99]:.2f}",
    "MB/step": "{megabytes_per_step:.0f}",
    "of peak": "{bandwidth_share:.0%}",
    "MFLOP/step": "{megaflops_per_step:.0f}",
    "of peak ": "{flops_share:.0%}",
    "forward": "{parts_ms[forward]:.2f}",
    "linears": "{parts_ms[linears]:.2f}",
    "attention": "{parts_ms[attention]:.2f}",
    "sampling": "{parts_ms[sampling]:.2f}",
    "other": "{parts_ms[bookkeeping]:.2f}",
    "barriers": "{barriers_ms:.3f}",
}


def print_rows(document: dict[str, Any]) -> None:
    """Print speed and limits of every row; disturbed ones are marked."""
    options, console = document["options"], make_console()
    console.print(
        f"{options['model']}, {document['parameters'] / 1e6:.1f}M parameters, "
        f"{document['device']}, {document['threads']} threads, torch {document['torch']}; "
        f"medians of {options['repeats']}; after N: frames in the context"
    )
    for dtype, ceiling in document["ceilings"].items():
        rate, flops = ceiling["bytes_per_second"] / 1e9, ceiling["flops_per_second"] / 1e9
        console.print(
            f"{dtype}: this machine reads {rate:.0f} GB/s, multiplies {flops:.0f} GFLOP/s"
        )
    rows = document["rows"]
    kinds = {key: {row[key] for row in rows} - {""} for key in ("dtype", "backend")}
    common = " ".join(value for values in kinds.values() if len(values) == 1 for value in values)
    told_apart = [key for key, values in kinds.items() if len(values) > 1] + ["schedule"]
    names = [" ".join(filter(None, (row[key] for key in told_apart))) for row in rows]
    names = [name + after(row, rows) for name, row in zip(names, rows, strict=True)]
    for title, texts in (("speed", SPEED), ("limits; parts of a step in ms", LIMITS)):
        columns = {h: t for h, t in texts.items() if any(cell(t, row) != "-" for row in rows)}
        lines = [
            [name + f" {MARK}" * row["disturbed"], *(cell(t, row) for t in columns.values())]
            for name, row in zip(names, rows, strict=True)
            if texts is SPEED or "step_ms" in row
        ]
        header = ["", *(name.strip() for name in columns)]
        print_table(console, f"{title} {common and f'({common})'}", header, lines)
    disturbed = [name for name, row in zip(names, rows, strict=True) if row["disturbed"]]
    if disturbed:
        console.print(disturbed_note(disturbed))


def after(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Say what a row goes on from, where rows differ in that (older files do not)."""
    counts = {other.get("context_frames") for other in rows}
    return f" after {row['context_frames']}" if len(counts) > 1 else ""


def cell(text: str, row: dict[str, Any]) -> str:
    """Fill in a number, or a dash where this row has none."""
    try:
        return text.format(**row)
    except (KeyError, TypeError):
        return "-"
