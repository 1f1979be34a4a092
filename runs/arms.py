"""What does a schedule cost, and what helps? Train the same model in several ways, and compare.

python runs/arms.py --study scratch --minutes 50      # again, until nothing is left
python runs/arms_report.py --studies scratch

A study is some arms: runs of `diagd train` or `finetune` that differ in a flag or two and share all
else, the batches of a seed too. The arm `raster` is the control that all are compared with. Each
call goes on where the last one ended, killed or not; calls with other --arms or --seeds may run at
the same time. A finished arm leaves ARM-SEED.jsonl, a line for each strategy with the likelihood
of held-out clips under it, and ARM-SEED.log.jsonl, its training loss.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro

from diagd.decoding.strategies.table import Diagonal
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.adapters import TENSORS_FILE
from diagd.families.checkpoints import WEIGHTS_FILE, load_model
from diagd.files import read_json_lines, write_text
from diagd.system import provenance
from diagd.tokenizers.shards import read_shards
from diagd.training.options import parse_mixture
from diagd.training.sequences import windows
from diagd.weight_files import read_weights

Flags = dict[str, Any]
ALL = "raster k=1 k=2 k=1,d=14"
UNTOUCHED = "untouched"  # an arm that is not trained at all


class Study(NamedTuple):
    """What the arms of a study share, and what each one has of its own.

    Attributes:
        command: of diagd, that trains them.
        flags: of that command, for all arms.
        arms: the flags of each arm, in the order of training.
        judged: strategies whose likelihood is measured.
    """

    command: Literal["train", "finetune"]
    flags: Flags
    arms: dict[str, Flags]
    judged: tuple[str, ...]


SCRATCH: Flags = {
    "model": "mc-ar-doom-small",
    "context-frames": 1,
    "frames": 4,
    "hold": 0.2,
    "batch-size": 4,
    "steps": 3000,
    "optimizer": "muon",
    "learning-rate": 3e-3,
    "warmup-steps": 50,
}
FINETUNED: Flags = {"init": "maze", "frames": 4}
ADAPTERS: dict[str, Flags] = {
    "full": {"learning-rate": 3e-4},
    **{f"rank{rank}": {"lora": rank} for rank in (1, 4, 8, 16, 64)},
    "stand-in": {"stand-in": True, "learning-rate": 1e-2},
    "both": {"lora": 16, "stand-in": True},
}
STUDIES = {
    # What does an order cost a model that is born to it?
    "scratch": Study(
        "train",
        SCRATCH,
        {
            "raster": {"strategy": "raster"},
            "k1": {"strategy": "k=1"},
            "mixture": {"strategy": ALL},
            "k2": {"strategy": "k=2"},
            "k1-overlap": {"strategy": "k=1,d=14"},
        },
        ("raster", "k=1", "k=2", "k=4", "k=1,d=14"),
    ),
    # The first column knows little of the row above: what helps there?
    "row-starts": Study(
        "finetune",
        FINETUNED
        | {
            "batch-size": 2,
            "steps": 400,
            "optimizer": "adamw",
            "learning-rate": 1e-4,
            "warmup-steps": 20,
        },
        {
            UNTOUCHED: {},
            "raster": {"strategy": "raster"},
            "k1": {"strategy": "k=1"},
            "k1-action": {"strategy": "k=1/action"},  # a stand-in that can be learnt
        },
        ("raster", "k=1", "k=1/action", "k=2"),
    ),
    # What do the few weights of an adapter recover of what finetuning all weights does?
    "adapters": Study(
        "finetune",
        FINETUNED | {"batch-size": 2},
        {
            UNTOUCHED: {},
            **{
                f"{arm}-{steps}": {**flags, "steps": steps}
                for steps in (50, 200, 800)
                for arm, flags in ADAPTERS.items()
            },
        },
        ("raster", "k=1", "k=2"),
    ),
    # What makes one model of all strategies out of one that exists already?
    "recipe": Study(
        "finetune",
        FINETUNED
        | {
            "batch-size": 4,
            "steps": 5000,
            "optimizer": "muon",
            "learning-rate": 1e-3,
            "warmup-steps": 100,
        },
        {
            UNTOUCHED: {},
            "raster": {"strategy": "raster"},
            "mixture": {"strategy": "raster k=1/action k=2/action k=1,d=14/action"},
        },
        ("raster", "k=1/action", "k=2/action", "k=4/action", "k=1,d=14/action", "k=1", "k=2"),
    ),
}


@dataclass(frozen=True)
class Options:
    """Train and judge the arms of a study one after the other, seed by seed."""

    study: str = "scratch"
    tokens: Path = Path("work/maze/tokens")  # folder with train and heldout
    work: Path = Path("work/arms")  # folder for the runs: STUDY/ARM-SEED
    out: Path = Path("work/arms")  # folder for the results: STUDY/ARM-SEED.jsonl
    arms: tuple[str, ...] = ()  # in the order of training; none: all of the study
    seeds: tuple[int, ...] = (0,)
    minutes: float = 50.0  # of this call; an arm that is not done goes on in the next
    changes: tuple[str, ...] = ()  # FLAG=VALUE of the training, in place of the study's
    judged: tuple[str, ...] = ()  # strategies to judge by; none: those of the study
    clips: int = 64  # held-out clips to judge by
    compile: bool = True  # torch.compile the loss
    threads: int = 1  # of a run; two wait for each other where others use the machine, too

    def __post_init__(self) -> None:
        if self.study not in STUDIES:
            raise ValueError(f"study must be one of {', '.join(STUDIES)}, got {self.study!r}")
        known = STUDIES[self.study].arms
        if unknown := [name for name in self.arms if name not in known]:
            raise ValueError(f"arms must be some of {', '.join(known)}, got {' '.join(unknown)!r}")
        if not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        if wrong := [change for change in self.changes if not change.partition("=")[1]]:
            raise ValueError(f"changes must look like FLAG=VALUE, got {wrong[0]!r}")

    def flags(self, arm: str) -> Flags:
        """Return what an arm is trained with, but for its seed and its folders."""
        study = STUDIES[self.study]
        changes = {flag: value for flag, _, value in (one.partition("=") for one in self.changes)}
        return study.flags | study.arms[arm] | changes


def main(options: Options) -> None:
    """Go on with the first arm that is not finished, and then the next, until the time is up."""
    torch.set_num_threads(options.threads)
    end = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for arm in options.arms or STUDIES[options.study].arms:
            result = options.out / options.study / f"{arm}-{seed}.jsonl"
            if result.is_file():
                check_same(result, options, arm)
                continue
            folder, log = options.work / options.study / f"{arm}-{seed}", ""
            if arm != UNTOUCHED:
                if not train(options, arm, seed, folder, end - time.monotonic()):
                    print(f"{folder}: time is up; the next call goes on", file=sys.stderr)
                    return
                log = (folder / "log.jsonl").read_text(encoding="utf-8")
            rows = judge(options, arm, folder)
            about = {"arm": arm, "seed": seed, "flags": options.flags(arm)}
            write_text(result.with_suffix(".log.jsonl"), log)
            write_text(result, "".join(json.dumps(about | row) + "\n" for row in rows))
            print(f"{result}: done", file=sys.stderr)


def check_same(result: Path, options: Options, arm: str) -> None:
    """Raise ValueError if a finished arm was trained or judged otherwise than is asked for."""
    first = read_json_lines(result)[0]
    found, asked = (
        {"clips": clips, **{flag: str(value) for flag, value in flags.items()}}
        for clips, flags in ((first["clips"], first["flags"]), (options.clips, options.flags(arm)))
    )
    for name in found | asked:
        if found.get(name) != asked.get(name):
            raise ValueError(
                f"{result} is of {name}={found.get(name)}, now {asked.get(name)}: remove it, "
                "or choose another --out"
            )


def words_of(flags: Flags) -> list[str]:
    """Spell flags as on a command line; those that are true have no value."""
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return words


def train(options: Options, arm: str, seed: int, folder: Path, seconds: float) -> bool:
    """Train an arm for so many seconds at most; returns whether it has taken all its steps."""
    flags = options.flags(arm) | {
        "tokens": options.tokens / "train",
        "out": folder,
        "seed": seed,
        "save-minutes": 2,
    }
    words = words_of(flags)
    words.append("--compile" if options.compile else "--no-compile")
    command = [sys.executable, "-m", "diagd", STUDIES[options.study].command, *words]
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


def judge(options: Options, arm: str, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each strategy: what held-out clips cost under it, in nats a token.

    The first frame of a clip is given. A model with a learnt stand-in is fed it where rows start.
    """
    flags = options.flags(arm)
    model = load_model(str(flags["init"]) if arm == UNTOUCHED else folder)
    clips = read_shards(options.tokens / "heldout")
    tokens, actions = windows(clips, options.clips, int(flags["frames"]))
    about = {
        "clips": len(tokens),
        "parameters": sum(x.numel() for x in model.parameters()),
        "trained": trained(folder),
        **provenance(torch.device("cpu")),
    }
    rows = []
    for strategy in parse_mixture(options.judged or STUDIES[options.study].judged):
        decoded = strategy
        if model.config.stand_in and isinstance(strategy, Diagonal):
            decoded = replace(strategy, row_start="learnt")
        parts = [
            strategy_nll(model, one, names, decoded)
            for one, names in zip(tokens.split(4), actions.split(4), strict=True)
        ]
        nll = torch.cat(parts).double()  # (clips, T, height, width)
        rows.append(
            {
                "strategy": str(strategy),
                "nll": nll.mean().item(),
                "by_frame": nll.mean((0, 2, 3)).tolist(),
                "by_row": nll.mean((0, 1, 3)).tolist(),
                "by_clip_and_column": nll.mean((1, 2)).round(decimals=5).tolist(),
                **about,
            }
        )
    return rows


def trained(folder: Path) -> int:
    """Return how many numbers a run wrote: of an adapter, or of a whole model."""
    adapter = folder / TENSORS_FILE
    if not adapter.is_file() and not (folder / WEIGHTS_FILE).is_file():
        return 0  # untouched
    weights = read_weights(adapter if adapter.is_file() else folder / WEIGHTS_FILE)
    return sum(weight.numel() for weight in weights.values())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
