"""kill -9 at random moments, ten times a command: the next run goes on, and ends with the same."""

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from diagd.cli import function_of, main
from tests.attack.commands import COMMANDS, flags_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="NO KILL TEST: needs SIGKILL"),
]

KILLS = 10
MORE = {
    "finetune": ("--save-minutes", 0, "--steps", 40, "--log-every", 8),
    "tokenize": ("--checkpoint-s", 0, "--steps", 30),
    "record": ("--clips", 40),
    "evaluate": ("--strategy", "raster k=1 k=2"),
}
TIMES = ("tokens_per_second", "frames_per_second", "stats", "run", "wall_seconds", "worker")


def run(arguments: list[str], folder: Path) -> None:
    """Run a command in a process of its own, which a server with all modules has forked."""
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["diagd", *arguments]
    with (folder / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        main()


def start(arguments: list[str], folder: Path) -> ForkServerProcess:
    folder.mkdir(exist_ok=True)
    forks = multiprocessing.get_context("forkserver")
    modules = [function_of(name).__module__ for name in COMMANDS]
    forks.set_forkserver_preload([__name__, "tests.data.recorders.scroller", *modules])
    process = forks.Process(target=run, args=(arguments, folder))
    process.start()
    return process


def contents(out: Path) -> dict[str, Any]:
    """Read what a command has left; times are left out, and what only a resumed run reads."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            kept = [line for line in lines if line.get("kind") != "run"]
            found[name] = [{k: line[k] for k in line if k not in TIMES} for line in kept]
        elif path.suffix == ".png":
            found[name] = "a picture"
        elif path.suffix == ".safetensors" and "training" not in path.parts:
            with safe_open(path, "pt") as file:  # whose header is in any order
                tensors = {key: file.get_tensor(key).tolist() for key in file.keys()}  # noqa: SIM118
                found[name] = tensors, file.metadata()
        elif "training" not in path.parts:
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_a_killed_command_ends_with_the_same(name: str, world: Path, tmp_path: Path) -> None:
    flags = flags_of(name, world, tmp_path, Path("out"))
    arguments = [name, *map(str, (*flags, *MORE.get(name, ())))]
    chance, kills, attempts = random.Random(15), 0, 0

    start(["--version"], tmp_path / "nothing").join()  # by then all modules are there
    started = time.monotonic()
    whole = start(arguments, tmp_path / "whole")
    whole.join(120)
    took = time.monotonic() - started
    assert whole.exitcode == 0, (tmp_path / "whole" / "said").read_text()
    expected = contents(tmp_path / "whole" / "out")

    while kills < KILLS:
        attempts += 1
        assert attempts < 10 * KILLS, f"killed only {kills} times: it is too quick"
        folder = tmp_path / f"killed-{attempts}"
        while True:
            process = start(arguments, folder)
            process.join(chance.uniform(0, took) if kills < KILLS else 120)
            if not process.is_alive():
                break
            process.kill()
            process.join()
            kills += 1
        said = (folder / "said").read_text()
        if name == "convert" and process.exitcode == 2:
            assert "holds a checkpoint already" in said  # it was killed after its work
        else:
            assert process.exitcode == 0, said
        assert contents(folder / "out") == expected
