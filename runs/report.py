"""Make the figures of the technical report, and the numbers of its tables, from docs/results/.

    python runs/report.py

Tables stand in docs/report/index.md between `<!-- table NAME -->` and `<!-- end -->`; figures are
docs/report/NAME.svg, the same bytes each time with one version of matplotlib.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.figure import Figure

from diagd.decoding.schedule import DiagonalSchedule, TokenGrid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
REPORT = ROOT / "docs/report"
BLUE, ORANGE, GREY, GREEN = "#3f51b5", "#f4711f", "#9aa0b4", "#2e8b57"
ARMS = ("raster", "mixture", "k1", "k1-overlap", "k2")
STRATEGIES = ("raster", "k=4", "k=2", "k=1", "k=1,d=14")
RULES = {
    "the design": "the design",
    "stand-ins seen until the true token comes": "stand-ins seen by others",
    "true row ends never cached": "row ends never cached",
}
PROCESSORS = {  # name: (file of `diagd bench`, dtype)
    "Intel Xeon, AMX": ("bench_cpu.jsonl", "bfloat16"),
    "AMD EPYC, Zen 5": ("zen5/bench_cpu.jsonl", "bfloat16"),
    "AMD EPYC, Zen 3": ("zen3/bench_avx2.jsonl", "float32"),
    "the Xeon, AVX2 alone": ("avx2/bench_avx2.jsonl", "float32"),
}

Row = dict[str, str]


def rows_of(name: str, heading: str = "", header: str = "") -> list[Row]:
    """Read a Markdown table of docs/results: of a heading, the first one with such a header."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    tables = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    for table in tables:
        lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
        if header in lines[0]:
            return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    raise ValueError(f"{name} has no table with a column {header!r}")


def value(cell: str) -> tuple[float, float]:
    """Read a cell such as `+0.096 ± 0.007 (63%)`: the number and its standard error."""
    numbers = re.findall(r"[-+]?\d+\.\d+", cell)
    return float(numbers[0]), float(numbers[1])


def short(cell: str) -> str:
    number, error = value(cell)
    return f"{number:+.3f} ± {error:.3f}"


def arms(study: str) -> dict[tuple[str, str], Row]:
    rows = rows_of("arms/arms.md", study, "arm")
    return {(row["arm"], row["strategy"]): row for row in rows}


def bench_rows(name: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the 42M model by strategy: Hugging Face, and our kernels."""
    found = {}
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        for row in run["rows"] if run["options"]["model"] == "mc-ar-42m" else ():
            if row["dtype"] == dtype and row["backend"] in ("native", ""):
                found[row["strategy"]] = row
    return found


def exact_runs(name: str) -> dict[str, dict[str, float]]:
    return json.loads((RESULTS / "exact" / name).read_text(encoding="utf-8"))["strategies"]


def table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def price_table() -> str:
    rows = {row["strategy"]: row for row in rows_of("finetune/finetune.md", header="strategy")}
    small = json.loads((RESULTS / "sizes/tune.json").read_text(encoding="utf-8"))["rows"]
    by_name = {row["name"]: row for row in small}
    lines = []
    for name in ("raster", "k=4", "k=2", "k=1"):
        row, less = rows[name], by_name[name]
        cells = [short(row[model]) for model in ("maze", "maze-k1", "maze-k2")]
        small_cell = f"{less['gap']:+.3f} ± {less['gap_error']:.3f}"
        lines.append([f"`{name}`", row["steps"], *cells, small_cell])
    head = ["strategy", "steps", "8.3M", "8.3M, finetuned for k=1", "for k=2", "2.2M"]
    return table(head, lines)


def clips_table() -> str:
    names = {
        "NTP (raster)": "raster",
        "DiagD k=4": "k=4",
        "DiagD k=2": "k=2",
        "DiagD k=1": "k=1",
    }
    report = "study/report.md"
    rows = [r for r in rows_of(report, "Quality and speed", "TFD↓") if r["Model"] == "doom"]
    paired = {
        r["Algorithm"]: r
        for r in rows_of(report, "Against raster", "ΔPSNR")
        if r["Model"] == "doom"
    }
    lines = []
    for row in rows:
        if row["Algorithm"] in names:
            gap = paired.get(row["Algorithm"], {})
            cells = [row[key].replace("*", "") for key in ("STEP↓", "FPS↑", "TFD↓")]
            psnr = row["PSNR↑"].replace("*", "").split(" ")[0]
            lines.append([f"`{names[row['Algorithm']]}`", *cells, psnr, gap.get("ΔPSNR", "")])
    return table(["strategy", "steps", "frames/s", "TFD", "PSNR, dB", "over raster, dB"], lines)


def rules_table() -> str:
    rows = rows_of("finetune/gap_study.md", header="schedule")
    kept = [row for row in rows if row["row start"] in ("", "temporal")]
    lines = [[f"`{row['schedule']}`", *(short(row[rule]) for rule in RULES)] for row in kept]
    return table(["strategy", *RULES.values()], lines)


def arms_table() -> str:
    found = arms("scratch")
    lines = [
        [f"`{arm}`", found[arm, "raster"]["seeds"]]
        + [short(found[arm, strategy]["all"]) for strategy in STRATEGIES]
        for arm in ARMS
    ]
    return table(["trained on", "seeds", *(f"`{name}`" for name in STRATEGIES)], lines)


def recipe_table() -> str:
    found = arms("recipe")
    names = ("raster", "k=4/action", "k=2/action", "k=1/action", "k=1,d=14/action")
    lines = [
        [f"`{arm}`", *(short(found[arm, name]["all"]) for name in names)]
        for arm in ("untouched", "raster", "mixture")
    ]
    return table(["finetuned on", *(f"`{name}`" for name in names)], lines)


def steps_table() -> str:
    grid = TokenGrid(num_frames=15, height=14, width=24)
    lines = []
    for row_lag, frame_lag in (
        (24, 336),
        (4, None),
        (4, 56),
        (2, None),
        (2, 28),
        (1, None),
        (1, 14),
    ):
        schedule = DiagonalSchedule(grid, row_lag, frame_lag)
        overlap = "" if frame_lag is None else f",d={frame_lag}"
        name = "raster" if row_lag == grid.width else f"k={row_lag}{overlap}"
        lines.append([f"`{name}`", f"{schedule.num_steps:,}", f"{schedule.speedup:.1f}"])
    return table(["strategy", "steps", "times fewer"], lines)


def exact_table() -> str:
    single, half = exact_runs("exact.json"), exact_runs("exact_bfloat16.json")
    names = ("raster", "exact,lanes=8", "exact,lanes=16", "exact,lanes=32", "exact,lanes=96", "k=1")
    lines = []
    for name in names:
        rows = single[name], half[name]
        lines.append(
            [f"`{name}`", f"{rows[0]['steps_a_frame']:.0f}", f"{rows[0]['fed_per_token']:.1f}"]
            + [f"{row['frames_per_second']:.1f} ({row['over_raster']:.1f}x)" for row in rows]
            + [f"{rows[0]['tokens_equal_to_raster']:.0%}"]
        )
    head = ["strategy", "steps a frame", "fed per token", "float32", "bfloat16", "raster's tokens"]
    return table(head, lines)


def speed_table() -> str:
    lines = []
    for processor, (name, dtype) in PROCESSORS.items():
        rows = bench_rows(name, dtype)
        cells = [f"{rows[key]['frames_per_second']:.2f}" for key in SPEEDS]
        slowest, fastest = (rows[key]["frames_per_second"] for key in ("hugging face", "k=1"))
        lines.append([processor, dtype, *cells, f"{fastest / slowest:.1f}x"])
    return table(["processor", "dtype", *SPEEDS.values(), "k=1 over Hugging Face"], lines)


SPEEDS = {"hugging face": "Hugging Face", "raster": "raster", "k=2": "k=2", "k=1": "k=1"}
TABLES: dict[str, Callable[[], str]] = {
    "price": price_table,
    "clips": clips_table,
    "rules": rules_table,
    "arms": arms_table,
    "recipe": recipe_table,
    "steps": steps_table,
    "exact": exact_table,
    "speed": speed_table,
}


def filled(text: str) -> str:
    """Put the tables of today's files into the report."""
    for name, make in TABLES.items():
        start, end = f"<!-- table {name} -->\n\n", "\n\n<!-- end -->"
        if text.count(start) != 1:
            raise ValueError(f"the report has {text.count(start)} places for the table {name}")
        before, _, rest = text.partition(start)
        text = before + start + make() + end + rest.partition(end)[2]
    return text


def price_figure() -> Figure:
    rows = {row["strategy"]: row for row in rows_of("finetune/finetune.md", header="strategy")}
    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    series = (
        ("maze", "as trained (raster order)", BLUE),
        ("maze-k1", "finetuned for k=1", ORANGE),
        ("maze-k2", "finetuned for k=2", GREEN),
    )
    for model, label, color in series:
        points = [
            (int(rows[name]["steps"]) / 7, *value(rows[name][model]))
            for name in ("k=1", "k=2", "k=4", "raster")
        ]
        steps, gaps, errors = zip(*points, strict=True)
        axis.errorbar(steps, gaps, errors, marker="o", capsize=3, color=color, label=label)
    axis.set(xscale="log", xlabel="steps a frame", ylabel="nats a token above raster")
    axis.set_xticks([37, 50, 76, 336], ["37\nk=1", "50\nk=2", "76\nk=4", "336\nraster"])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return figure


def arms_figure() -> Figure:
    found = arms("scratch")
    figure, axis = pyplot.subplots(figsize=(7, 3.2))
    colors = {"raster": GREY, "mixture": ORANGE, "k1": BLUE, "k2": GREEN}
    for n, (arm, color) in enumerate(colors.items()):
        cells = [value(found[arm, strategy]["all"]) for strategy in STRATEGIES]
        places = [place + 0.2 * n for place in range(len(STRATEGIES))]
        gaps, errors = zip(*cells, strict=True)
        axis.bar(places, gaps, 0.18, yerr=errors, color=color, label=f"trained on {arm}", capsize=2)
    axis.set_xticks([place + 0.3 for place in range(len(STRATEGIES))], STRATEGIES)
    axis.set(xlabel="decoded as", ylabel="nats a token above the\ncontrol in raster order")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.legend(frameon=False, loc="upper center")
    return figure


def columns_figure() -> Figure:
    found = arms("scratch")
    figure, axis = pyplot.subplots(figsize=(6, 2.8))
    columns = {"column 0": "0", "1": "1", "2 to 5": "2 to 5", "6 on": "6 to 23"}
    for n, (arm, color) in enumerate((("raster", GREY), ("mixture", ORANGE))):
        cells = [value(found[arm, "k=1"][column]) for column in columns]
        gaps, errors = zip(*cells, strict=True)
        places = [place + 0.38 * n for place in range(len(columns))]
        axis.bar(places, gaps, 0.35, yerr=errors, color=color, label=f"trained on {arm}", capsize=2)
    axis.set_xticks([place + 0.19 for place in range(len(columns))], list(columns.values()))
    axis.set(xlabel="column of the frame", ylabel="nats a token above\nraster, decoded as k=1")
    axis.legend(frameon=False)
    return figure


def rules_figure() -> Figure:
    rows = rows_of("finetune/gap_study.md", header="schedule")
    kept = [row for row in rows if row["row start"] in ("", "temporal")]
    figure, axis = pyplot.subplots(figsize=(6, 3))
    for n, (rule, color) in enumerate(zip(RULES, (BLUE, GREEN, ORANGE), strict=True)):
        gaps, errors = zip(*(value(row[rule]) for row in kept), strict=True)
        places = [place + 0.27 * n for place in range(len(kept))]
        axis.bar(places, gaps, 0.25, yerr=errors, color=color, label=RULES[rule], capsize=2)
    axis.set_xticks([place + 0.27 for place in range(len(kept))], [row["schedule"] for row in kept])
    axis.set(ylabel="nats a token above raster")
    axis.legend(frameon=False)
    return figure


def exact_figure() -> Figure:
    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    for file, label, color in (
        ("exact.json", "float32", BLUE),
        ("exact_bfloat16.json", "bfloat16", ORANGE),
    ):
        runs = exact_runs(file)
        points = [
            (int(name[12:]), run["over_raster"]) for name, run in runs.items() if "lanes" in name
        ]
        lanes, gains = zip(*points, strict=True)
        axis.plot(lanes, gains, marker="o", color=color, label=f"time, {label}")
    runs = exact_runs("exact.json")
    points = [(int(name[12:]), run["fewer_steps"]) for name, run in runs.items() if "lanes" in name]
    lanes, fewer = zip(*points, strict=True)
    axis.plot(lanes, fewer, marker="s", linestyle="--", color=GREY, label="steps")
    axis.set(xlabel="tokens fed in a step, at most", ylabel="times over raster", ylim=(0, None))
    axis.legend(frameon=False)
    return figure


def speed_figure() -> Figure:
    figure, axis = pyplot.subplots(figsize=(8, 3))
    places = range(len(PROCESSORS))
    colors = dict(zip(SPEEDS, (GREY, BLUE, GREEN, ORANGE), strict=True))
    for n, (name, label) in enumerate(SPEEDS.items()):
        rates = [
            bench_rows(file, dtype)[name]["frames_per_second"]
            for file, dtype in PROCESSORS.values()
        ]
        starts = [place + 0.2 * n for place in places]
        bars = axis.bar(starts, rates, 0.18, color=colors[name], label=label)
        axis.bar_label(bars, [f"{rate:.1f}" for rate in rates], fontsize=8)
    names = [f"{name}\n{dtype}" for name, (_, dtype) in PROCESSORS.items()]
    axis.set_xticks([place + 0.3 for place in places], names)
    axis.set(ylabel="frames/s")
    axis.legend(frameon=False)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "price": price_figure,
    "arms": arms_figure,
    "columns": columns_figure,
    "rules": rules_figure,
    "exact": exact_figure,
    "speed": speed_figure,
}


def draw(folder: Path) -> None:
    settings = {"svg.hashsalt": "diagd", "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(settings):
        for name, make in FIGURES.items():
            figure = make()
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


def main() -> None:
    page = REPORT / "index.md"
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw(REPORT)


if __name__ == "__main__":
    main()
