"""Compare this tree's native decoding with another checkout of diagd, such as the commit before.

Both run the same `diagd bench` in turns, so that a machine that slows down slows both. Shares are
of the memory and multiply rates of the machine, as `diagd bench` measures both.

    git worktree add ../before COMMIT
    python runs/side_by_side.py --before ../before --out docs/results/side_by_side.json
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from diagd.files import write_json
from diagd.system import git_commit

SHOWN = ("seconds", "frames_per_second", "bandwidth_share", "flops_share")
HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    """What is compared."""

    before: Path  # the other checkout
    out: Path | None = None  # a JSON file
    models: tuple[str, ...] = ("doom", "mc-ar-42m")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    row_lag: tuple[int, ...] = (1, 4)
    context_frames: tuple[int, ...] = ()  # as `diagd bench` chooses
    rounds: int = 3  # of both trees, one after the other
    repeats: int = 3  # timed runs a round


def main(options: Options) -> None:
    """Run both in turns, and print the ratio of their medians."""
    timed: dict[tuple[str, str, str, int], dict[str, dict[str, list[float]]]] = {}
    machine: dict[str, Any] = {}
    for _ in range(options.rounds):
        for model in options.models:
            for label, tree in (("before", options.before), ("now", HERE)):
                document = _bench(tree, model, options)
                machine = {name: document[name] for name in ("device", "threads", "torch")}
                for row in document["rows"]:
                    strategy = row.get("strategy") or row["schedule"]  # of commits before
                    key = model, row["dtype"], strategy, row.get("context_frames", 1)
                    of = timed.setdefault(key, {}).setdefault(label, {name: [] for name in SHOWN})
                    for name, numbers in of.items():
                        numbers.append(row[name])
    rows = [
        {
            "model": model,
            "dtype": dtype,
            "strategy": strategy,
            "context_frames": context_frames,
            **of_both,
            "ratio": _median(of_both, "now") / _median(of_both, "before"),
        }
        for (model, dtype, strategy, context_frames), of_both in timed.items()
    ]
    heads = "frames/s before", "now", "of memory", "of multiply", "time"
    table = Table("", *heads, box=SIMPLE, title="medians of rounds; shares now, time now/before")
    for row in rows:
        name = f"{row['model']} {row['dtype']} {row['strategy']} after {row['context_frames']}"
        frames = (f"{_median(row, label, SHOWN[1]):.2f}" for label in ("before", "now"))
        shares = (f"{_median(row, 'now', share):.0%}" for share in SHOWN[2:])
        table.add_row(name, *frames, *shares, f"{row['ratio']:.3f}")
    Console().print(table)
    if options.out is not None:
        commits = {"before": git_commit(options.before), "now": git_commit(HERE)}
        write_json(options.out, {"commits": commits, **machine, "rows": rows}, indent=1)


def _bench(tree: Path, model: str, options: Options) -> dict[str, Any]:
    """Run a tree's own `diagd bench`; its document."""
    lags = [str(lag) for lag in options.row_lag]
    command = [sys.executable, "-m", "diagd", "bench", "--model", model, "-k", *lags]
    command += ["--dtype", *options.dtypes, "--baseline", "none"]
    command += ["--repeats", str(options.repeats), "--json"]
    if options.context_frames:
        command += ["--context-frames", *map(str, options.context_frames)]
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def _median(row: dict[str, Any], label: str, of: str = "seconds") -> float:
    return statistics.median(row[label][of])


if __name__ == "__main__":
    main(tyro.cli(Options))
