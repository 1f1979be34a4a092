"""Measure decoding on a busy machine: beside busy processes, and on fewer cores than threads.

Every case is a process of its own that writes one raster frame and some diagonal ones of the
bundled model. Leave the machine alone but for this.

    python runs/busy.py --out docs/results/busy.json
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from diagd.files import write_json
from diagd.system import cpu_name, git_commit

SPIN = "while True: pass"
DECODE = """
import sys, json, torch, diagd
from diagd.data.video import read_video
from diagd.families.checkpoints import model_path
threads, backend, repeats = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
world = diagd.VideoGenerator.from_pretrained("doom", dtype="float32", backend=backend)
frames = read_video(model_path("doom") / "prompt.mp4").frames[-4:]
def seconds(strategy, count):
    walk = ["forward"] * count
    between = ["forward"] * 3
    video = world.generate(frames, walk, count, strategy=strategy, context_actions=between)
    return video.stats.seconds
seconds("k=1", 1)
print(json.dumps({"raster": [seconds("raster", 1) for _ in range(repeats)],
                  "k=1": [seconds("k=1", 4) for _ in range(repeats)]}))
"""


@dataclass(frozen=True)
class Options:
    """What is measured."""

    out: Path | None = None  # a JSON file
    busy: tuple[int, ...] = (0, 1, 2, 4)  # busy processes beside it
    threads: tuple[int, ...] = (2, 1)
    backends: tuple[str, ...] = ("native", "eager")
    one_core: bool = True  # also bound to a single core, as by a quota, beside nobody
    repeats: int = 3  # of each measurement
    limit_s: float = 120.0  # a case that takes longer is reported as such


def main(options: Options) -> None:
    """Measure every case, and print seconds: one raster frame, and four of k=1."""
    loads = [(count, False) for count in options.busy] + [(0, True)] * options.one_core
    cases = [(*load, b, n) for load in loads for b in options.backends for n in options.threads]
    rows = [
        {"busy": busy, "one_core": one_core, "backend": backend, "threads": threads}
        | _measure(busy, one_core, backend, threads, options)
        for busy, one_core, backend, threads in track(cases)
    ]
    table = Table("beside", "backend", "threads", "raster, s", "k=1, s", box=SIMPLE)
    for row in rows:
        beside = "one core" if row["one_core"] else f"{row['busy']} busy"
        seconds = [
            f"{statistics.median(row[name]):.2f}" if row[name] else f"> {options.limit_s:.0f}"
            for name in ("raster", "k=1")
        ]
        table.add_row(beside, row["backend"], str(row["threads"]), *seconds)
    Console().print(table)
    if options.out is not None:
        machine = {"device": cpu_name(), "cores": os.cpu_count(), "commit": git_commit()}
        write_json(options.out, {**machine, "rows": rows}, indent=1)


def _measure(
    busy: int, one_core: bool, backend: str, threads: int, options: Options
) -> dict[str, list[float]]:
    beside = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(busy)]
    command = ["taskset", "-c", "0"] if one_core else []
    command += [sys.executable, "-c", DECODE, str(threads), backend, str(options.repeats)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=options.limit_s)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"raster": [], "k=1": []}
    finally:
        for process in beside:
            process.kill()


if __name__ == "__main__":
    main(tyro.cli(Options))
