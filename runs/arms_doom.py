"""What does an order cost a model that is born to it? Train the same model under each, and compare.

python runs/arms_doom.py --tokens work/doom/tokens --minutes 50      # again, until nothing is left
python runs/arms_report.py

An arm is a mixture of strategies and a rule of who sees whom; all else is the same for all arms of
a seed, the batches too. Each call goes on where the last one ended, killed or not; calls with other
--arms or --seeds may run at the same time. A finished arm leaves ARM-SEED.jsonl, a line for each
strategy with the likelihood of held-out clips under it, and ARM-SEED.log.jsonl, its training loss.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro

from diagd.decoding.likelihood import strategy_nll
from diagd.decoding.visibility import VisibilityRule
from diagd.families.checkpoints import load_model
from diagd.files import write_text
from diagd.provenance import provenance
from diagd.tokenizers.shards import read_shards
from diagd.training.mixture import Mixture
from diagd.training.sequences import windows


class Arm(NamedTuple):
    """What an arm's steps are taken under."""

    strategies: str
    visible: VisibilityRule = "causal"


ARMS = {
    "raster": Arm("raster"),
    "k1": Arm("k=1"),
    "k1-fed": Arm("k=1", "fed"),
    "mixture": Arm("raster k=1 k=2 k=1,d=14"),
    "mixture-fed": Arm("raster k=1 k=2 k=1,d=14", "fed"),
    "k2": Arm("k=2"),
    "k1-overlap": Arm("k=1,d=14"),
}


@dataclass(frozen=True)
class Options:
    """Train and judge arms one after the other, seed by seed."""

    tokens: Path = Path("work/doom/tokens")  # folder with train and heldout
    work: Path = Path("work/arms")  # folder for the runs
    out: Path = Path("docs/results/arms")  # folder for the results
    arms: tuple[str, ...] = ("raster", "k1", "k1-fed", "mixture")  # in the order of training
    seeds: tuple[int, ...] = (0,)
    minutes: float = 50.0  # of this call; an arm that is not done goes on in the next
    model: str = "mc-ar-doom-small"
    frames: int = 4  # of a training sequence and of a judged clip
    batch_size: int = 4
    steps: int = 3000
    learning_rate: float = 3e-3
    judged: tuple[str, ...] = ("raster", "k=1", "k=2", "k=4", "k=1,d=14")
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
    """Go on with the first arm that is not finished, and then the next, until the time is up."""
    end = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for name in options.arms:
            result = options.out / f"{name}-{seed}.jsonl"
            if result.is_file():
                continue
            folder = options.work / f"{name}-{seed}"
            if not train(options, ARMS[name], seed, folder, end - time.monotonic()):
                print(f"{folder}: time is up; the next call goes on", file=sys.stderr)
                return
            options.out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / "log.jsonl", result.with_suffix(".log.jsonl"))
            about = {"arm": name, "seed": seed, **ARMS[name]._asdict()}
            lines = [json.dumps(about | row) for row in judge(options, ARMS[name], folder)]
            write_text(result, "\n".join(lines) + "\n")
            print(f"{result}: done", file=sys.stderr)


def train(options: Options, arm: Arm, seed: int, folder: Path, seconds: float) -> bool:
    """Train an arm for so many seconds at most; returns whether it has taken all its steps."""
    flags: dict[str, Any] = {
        "tokens": options.tokens / "train",
        "out": folder,
        "strategies": arm.strategies,
        "visible": arm.visible,
        "context-frames": 1,
        "model": options.model,
        "frames": options.frames,
        "hold": 0.2,
        "batch-size": options.batch_size,
        "steps": options.steps,
        "optimizer": "muon",
        "learning-rate": options.learning_rate,
        "warmup-steps": min(50, options.steps // 2),
        "seed": seed,
        "save-minutes": 2,
    }
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    words.append("--compile" if options.compile else "--no-compile")
    command = [sys.executable, "-m", "diagd", "train", *words]
    if shutil.which("nice"):
        command = ["nice", *command]
    try:
        subprocess.run(
            command,
            check=True,
            timeout=max(seconds, 0.1),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        )
    except subprocess.TimeoutExpired:  # the run is killed, and loses what it has not saved
        return False
    return True


def judge(options: Options, arm: Arm, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each strategy: what held-out clips cost under it, in nats a token.

    Every clip is read under the arm's own rule of who sees whom; the first frame is given.
    """
    model = load_model(folder)
    tokens, actions = windows(
        read_shards(options.tokens / "heldout"), options.clips, options.frames
    )
    settings = asdict(options) | {"parameters": sum(x.numel() for x in model.parameters())}
    rows = []
    for strategy in Mixture.parse(options.judged).weights:
        nll = torch.cat(
            [
                strategy_nll(model, one, names, strategy, visible=arm.visible)
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
                "options": {name: str(value) for name, value in settings.items()},
                **provenance(torch.device("cpu")),
            }
        )
    return rows


if __name__ == "__main__":
    main(tyro.cli(Options))
