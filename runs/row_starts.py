"""What helps where a row starts? Finetune the bundled world for each mechanism, and compare.

python runs/row_starts.py --minutes 50                            # again, until nothing is left
python runs/arms_report.py --results docs/results/row_starts      # pictures, column by column

The first column knows little of the row above. An arm is the bundled world finetuned as long as the
others on the same batches: `raster` is the control that all are compared with, `untouched` is not
trained at all. Each call goes on where the last one ended, killed or not; calls with other --arms
or --seeds may run at the same time. A finished arm leaves ARM-SEED.jsonl in the form of
runs/arms_doom.py, and each call ends with a table of what is there.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from diagd.decoding.likelihood import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.files import read_json_lines, write_text
from diagd.provenance import provenance
from diagd.tokenizers.shards import read_shards
from diagd.training.mixture import Mixture
from diagd.training.sequences import windows

CONTROL, UNTOUCHED = "raster", "untouched"
ARMS = {  # and what their steps are taken under
    CONTROL: "raster",
    UNTOUCHED: "",
    "k1": "k=1",
    "k1-action": "k=1/action",  # an action token stands in: a query that can be learnt
    "k1-late1": "k=1,late=1",
    "k1-late2": "k=1,late=2",
    "k1-late1-action": "k=1/action,late=1",
}
PARTS = {"column 0": slice(0, 1), "1": slice(1, 2), "2 to 5": slice(2, 6), "6 on": slice(6, None)}


@dataclass(frozen=True)
class Options:
    """Finetune and judge arms one after the other, seed by seed."""

    tokens: Path = Path("work/doom/tokens")  # folder with train and heldout
    work: Path = Path("work/row_starts")  # folder for the runs
    out: Path = Path("docs/results/row_starts")  # folder for the results
    init: str = "doom"  # the world to start from
    arms: tuple[str, ...] = tuple(ARMS)  # in the order of training
    seeds: tuple[int, ...] = (0,)
    minutes: float = 50.0  # of this call; an arm that is not done goes on in the next
    frames: int = 4  # of a training sequence and of a judged clip
    batch_size: int = 2
    steps: int = 1000
    learning_rate: float = 1e-4
    judged: tuple[str, ...] = ("raster", "k=1", "k=1/action", "k=1,late=1", "k=1,late=2", "k=2")
    clips: int = 64  # held-out clips to judge by
    compile: bool = True  # torch.compile the loss
    threads: int = 1  # of a run; two wait for each other where others use the machine, too

    def __post_init__(self) -> None:
        unknown = [name for name in self.arms if name not in ARMS]
        if unknown or not self.arms:
            raise ValueError(f"arms must be some of {', '.join(ARMS)}, got {' '.join(unknown)!r}")
        if not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")


def main(options: Options) -> None:
    """Train and judge what is missing until the time is up; write and print the table."""
    torch.set_num_threads(options.threads)
    go_on(options)
    if options.out.is_dir():
        text = table(options.out)
        write_text(options.out / "row_starts.md", text)
        print(text)


def go_on(options: Options) -> None:
    """Go on with the first arm that is not finished, and then the next, until the time is up."""
    end = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for name in options.arms:
            result = options.out / f"{name}-{seed}.jsonl"
            if result.is_file():
                continue
            folder, log = options.work / f"{name}-{seed}", ""
            if name != UNTOUCHED:
                if not finetune(options, ARMS[name], seed, folder, end - time.monotonic()):
                    print(f"{folder}: time is up; the next call goes on", file=sys.stderr)
                    return
                log = (folder / "log.jsonl").read_text(encoding="utf-8")
            rows = judge(options, options.init if name == UNTOUCHED else str(folder))
            about = {"arm": name, "seed": seed, "strategies": ARMS[name]}
            options.out.mkdir(parents=True, exist_ok=True)
            write_text(result.with_suffix(".log.jsonl"), log)
            write_text(result, "".join(json.dumps(about | row) + "\n" for row in rows))


def finetune(options: Options, strategies: str, seed: int, folder: Path, seconds: float) -> bool:
    """Train an arm for so many seconds at most; returns whether it has taken all its steps."""
    flags: dict[str, Any] = {
        "init": options.init,
        "tokens": options.tokens / "train",
        "out": folder,
        "strategies": strategies,
        "frames": options.frames,
        "batch-size": options.batch_size,
        "steps": options.steps,
        "learning-rate": options.learning_rate,
        "warmup-steps": min(20, options.steps // 2),
        "seed": seed,
        "save-minutes": 2,
    }
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    words.append("--compile" if options.compile else "--no-compile")
    command = [sys.executable, "-m", "diagd", "finetune", *words]
    if shutil.which("nice"):
        command = ["nice", *command]
    threads = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    try:
        subprocess.run(
            command,
            check=True,
            timeout=max(seconds, 0.1),
            stdout=subprocess.DEVNULL,
            env=threads,
        )
    except subprocess.TimeoutExpired:  # the run is killed, and loses what it has not saved
        return False
    return True


def judge(options: Options, model: str) -> list[dict[str, Any]]:
    """Return a row for each strategy: what held-out clips cost under it, in nats a token."""
    transformer = load_model(model)
    tokens, actions = windows(
        read_shards(options.tokens / "heldout"), options.clips, options.frames
    )
    rows = []
    for strategy in Mixture.parse(options.judged).weights:
        nll = torch.cat(
            [
                strategy_nll(transformer, one, names, strategy)
                for one, names in zip(tokens.split(4), actions.split(4), strict=True)
            ]
        ).double()  # (clips, T, height, width)
        rows.append(
            {
                "strategy": str(strategy),
                "nll": nll.mean().item(),
                "by_clip": nll.mean((1, 2, 3)).tolist(),
                "by_frame": nll.mean((0, 2, 3)).tolist(),
                "by_row": nll.mean((0, 1, 3)).tolist(),
                "by_column": nll.mean((0, 1, 2)).tolist(),
                "by_clip_and_column": nll.mean((1, 2)).tolist(),
                "options": {name: str(value) for name, value in asdict(options).items()},
                **provenance(torch.device("cpu")),
            }
        )
    return rows


def table(results: Path) -> str:
    """Return what each arm costs above the control in raster order, as Markdown.

    Where there is no control yet, above the untouched world in raster order.
    """
    rows = [
        row
        for path in sorted(results.glob("*.jsonl"))
        if not path.name.endswith(".log.jsonl")
        for row in read_json_lines(path)
    ]
    costs = {
        (row["arm"], row["seed"], row["strategy"]): torch.tensor(row["by_clip_and_column"])
        for row in rows
    }
    base = CONTROL if any(arm == CONTROL for arm, _, _ in costs) else UNTOUCHED
    lines = [
        f"Nats a token above the arm `{base}` in raster order, paired, with the standard error",
        "over clips; then the same for some columns. Seeds are averaged.",
        "",
        "| arm | strategy | all | " + " | ".join(PARTS) + " |",
        "|---|---|---|" + "---|" * len(PARTS),
    ]
    for arm, strategy in dict.fromkeys((arm, strategy) for arm, _, strategy in costs):
        gaps = [
            cost - costs[base, seed, "raster"]
            for (name, seed, one), cost in costs.items()
            if (name, one) == (arm, strategy) and (base, seed, "raster") in costs
        ]
        if gaps:
            gap = torch.stack(gaps).mean(0)  # (clips, width)
            cells = [cell(part) for part in (gap, *(gap[:, span] for span in PARTS.values()))]
            lines.append(f"| {arm} | {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(gap: Tensor) -> str:
    """Spell the mean of (clips, columns) and its standard error over clips."""
    by_clip = gap.mean(1)
    error = by_clip.std().item() / math.sqrt(len(by_clip)) if len(by_clip) > 1 else 0.0
    return f"{by_clip.mean().item():+.4f} ± {error:.4f}"


if __name__ == "__main__":
    main(tyro.cli(Options))
