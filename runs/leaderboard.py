"""Make an entry of LEADERBOARD.md, or its tables.

    python runs/leaderboard.py --model maze --strategy k=4 --who NAME --out docs/leaderboard/k4.json
    python runs/leaderboard.py --table      # writes docs/leaderboard into the page

An entry measures the likelihood of fixed held-out tokens and the seconds a frame in one run, of one
prepared model, on two threads.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from diagd.backends.devices import device_of, dtype_of
from diagd.backends.names import Backend, DTypeName
from diagd.backends.prepare import prepare
from diagd.console import track
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Raster, parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import load_model, model_path
from diagd.files import write_json, write_text
from diagd.system import fingerprint, provenance
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import windows
from diagd.training.setup import check_fit

ROOT = Path(__file__).parent.parent
ENTRIES = ROOT / "docs" / "leaderboard"
PAGE = ROOT / "LEADERBOARD.md"
LIMIT = 1.61  # nats a token: what the bundled maze has in raster order, and 0.02 more
THREADS = 2
SAMPLING = SamplingOptions(1.0, top_p=0.9)


@dataclass(frozen=True)
class Options:
    """Measure an entry, or write the tables of all."""

    who: str = ""  # name of the entry's author
    model: str = "maze"  # bundled model or folder
    strategy: str = "raster"  # how it decodes
    dtype: DTypeName = "float32"  # of the weights
    backend: Backend = "auto"  # what runs the steps
    out: Path | None = None  # the entry's file, in docs/leaderboard
    table: bool = False  # write the tables instead
    tokens: Path = ENTRIES / "tokens"  # others than the leaderboard's are for trials
    page: Path = PAGE
    repeats: int = 3  # of the decoding of each clip

    def __post_init__(self) -> None:
        if not self.table and (self.out is None or not self.who):
            raise ValueError("an entry needs --who and --out, a file in docs/leaderboard")


def measure(options: Options) -> dict[str, Any]:
    """Return an entry: likelihood, and seconds a frame with their spread."""
    torch.set_num_threads(THREADS)
    clips, strategy = read_shards(options.tokens), parse_strategy(options.strategy)
    if not strategy.has_schedule and strategy.promise == "no":
        raise ValueError(f"{strategy} has no schedule and promises nothing: its loss is not known")
    is_int8 = options.dtype == "int8"
    model = load_model(options.model, dtype=dtype_of(options.dtype))
    check_fit(options.model, model.config, clips)
    prepared, backend = prepare(model, options.backend, is_int8)
    tokens, actions = windows(clips, len(clips.tokens), clips.tokens.shape[1])
    single = list(zip(tokens.split(1), actions.split(1), strict=True))
    judged = strategy if strategy.has_schedule else Raster()  # whose tokens it writes
    nll = [strategy_nll(prepared, *clip, judged).mean().item() for clip in track(single, "loss")]
    grid = TokenGrid(tokens.shape[1] - 1, *tokens.shape[2:])
    seconds: list[float] = []
    work = [clip for clip in single for _ in range(options.repeats)]
    for seed, (frames, moves) in enumerate(track([single[0], *work], "speed")):  # one warms up
        out = generate_tokens(
            prepared, frames[:, 0].flatten(1), strategy, moves[:, 1:], 1, grid, SAMPLING, seed
        )
        seconds.append(out.stats.seconds / grid.num_frames)
    ordered = sorted(seconds[1:])
    return {
        "who": options.who,
        "model": Path(options.model).name,
        "weights": fingerprint(model_path(options.model)),
        "strategy": strategy.name,
        "dtype": options.dtype,
        "backend": backend,
        "nll": statistics.mean(nll),
        "seconds_a_frame": statistics.median(ordered),
        "seconds_a_frame_min": ordered[0],
        "seconds_a_frame_max": ordered[-1],
        "clips": len(single),
        **provenance(device_of("cpu")),
    }


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Format the entries as lines of Markdown, those within the limit first, the fastest on top."""
    lines = [
        "| seconds a frame [min-max] | nats a token | model | strategy | runs on | device | who |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(entries, key=lambda one: (one["nll"] > LIMIT, one["seconds_a_frame"])):
        spread = "{seconds_a_frame_min:.3f}-{seconds_a_frame_max:.3f}".format(**one)
        over = " (over the limit)" if one["nll"] > LIMIT else ""
        cells = (
            f"{one['seconds_a_frame']:.3f} [{spread}]",
            f"{one['nll']:.4f}{over}",
            one["model"],
            one["strategy"],
            f"{one['backend']} {one['dtype']}",
            one["device"],
            one["who"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def machines(documents: list[dict[str, Any]]) -> list[str]:
    """Format what `diagd bench --submit` wrote: frames/s at a full context, the fastest on top."""
    lines = [
        "| device | threads | runs on | raster | k=1 | k=1 over Hugging Face | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    found = list[tuple[float, str]]()
    for one in documents:
        full = max(row["context_frames"] for row in one["rows"])
        rows = {
            (row["backend"], row["dtype"], row["strategy"]): row
            for row in one["rows"]
            if row["context_frames"] == full
        }
        for (backend, dtype, strategy), row in rows.items():
            if strategy == "k=1":
                over, raster = row["over_hugging_face"], rows[backend, dtype, "raster"]
                cells = (
                    one["device"],
                    str(one["threads"]),
                    f"{backend} {dtype}",
                    f"{raster['frames_per_second']:.1f}",
                    f"{row['frames_per_second']:.1f}",
                    f"{over:.1f}x" if over else "-",
                    str(one["commit"]),
                )
                found.append((-row["frames_per_second"], f"| {' | '.join(cells)} |"))
    return lines + [line for _, line in sorted(found)]


def write_tables(page: Path, entries: Path) -> None:
    """Replace the tables between the marks of the page."""
    text = page.read_text(encoding="utf-8")
    for name, folder, make in (
        ("entries", entries, table),
        ("machines", entries / "machines", machines),
    ):
        paths = sorted(folder.glob("*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(start)
        _, closing, after = rest.partition(end)
        if not (mark and closing):
            raise ValueError(f"{page}: expected {start.strip()} and {end}")
        shown = "\n".join(make(found)) if found else "Nothing has been measured yet."
        text = f"{before}{start}\n{shown}\n\n{end}{after}"
    write_text(page, text)


def main(options: Options) -> None:
    """Measure, or write the tables."""
    if options.table or options.out is None:
        write_tables(options.page, ENTRIES)
        return
    entry = measure(options)
    write_json(options.out, entry, indent=1)
    print(json.dumps(entry, indent=1))
    if entry["nll"] > LIMIT:
        print(f"over the limit of {LIMIT} nats a token", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except (OSError, ValueError) as error:
        sys.exit(f"leaderboard: {error}")
