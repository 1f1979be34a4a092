"""Measure decoding, training and play beside busy processes, with PyTorch's threads set and not.

Every case is a process of its own: our kernels, PyTorch's, a model of transformers, training, and
frames as `diagd play` shows them. "free" is what diagd does, "N set" what PyTorch alone would.
Leave the machine alone but for this; rows of other loads stay in the file.

    python runs/busy.py --busy 0 --out docs/results/zen5/busy.json    # and --busy 1, --busy 4
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

import diagd
from diagd.data.video import read_video
from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.checkpoints import model_path
from diagd.families.presets import PRESETS
from diagd.files import read_json_object, write_json
from diagd.models.transformer import Transformer
from diagd.system import provenance
from diagd.threads import follow_free_cores
from diagd.training.mixture import ViewLoss

SPIN = "while True: pass"
STRATEGIES = "raster", "k=1"
Work = dict[str, Callable[[], object]]  # what is timed, by name: a frame each, or a step


@dataclass(frozen=True)
class Options:
    """What is measured."""

    out: Path | None = None  # a JSON file
    busy: tuple[int, ...] = (0, 1, 4)  # busy processes beside it
    threads: tuple[int, ...] = (0, os.cpu_count() or 1)  # 0: as diagd has it; else set
    works: tuple[str, ...] = ("native", "eager", "hugging face", "training", "play")
    rounds: int = 2  # in which the cases take turns
    seconds: float = 3.0  # of each measurement, which is a frame or a step at least
    work: str | None = None  # measure this here and now, which is what the processes do


def main(options: Options) -> None:
    """Measure every case, and print the median milliseconds of a frame, or of a step."""
    rows: list[dict[str, Any]] = []
    if options.work is not None:
        print(json.dumps(_measure(WORKS[options.work](options.work), options.seconds)))
        return
    cases = list(itertools.product(options.busy, options.works, options.threads))
    found: dict[tuple[int, str, int], dict[str, list[float]]] = {case: {} for case in cases}
    for busy, work, threads in track(cases * options.rounds):
        with _neighbours(busy):
            took = _run(work, threads, options.seconds)
        for name, ms in took.items():
            found[busy, work, threads].setdefault(name, []).extend(ms)
        rows = [
            {
                "busy": busy,
                "work": work,
                "threads": f"{threads} set" if threads else "free",
                "ms": ms,
            }
            for (busy, work, threads), ms in found.items()
        ]
        if options.out is not None:  # after each, for this takes minutes
            _write(options.out, rows)
    _print(rows if options.out is None else read_json_object(options.out)["rows"])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    before = read_json_object(path)["rows"] if path.is_file() else []
    loads = {row["busy"] for row in rows}
    rows = [row for row in before if row["busy"] not in loads] + rows
    rows.sort(key=lambda row: row["busy"])  # stable
    write_json(path, {**provenance(torch.device("cpu")), "rows": rows}, indent=1)


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "work", "threads", *(f"{n} busy" for n in {r["busy"]: 0 for r in rows}), box=SIMPLE
    )
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, took in row["ms"].items():
            key = f"{row['work']}, {name}", row["threads"]
            cells.setdefault(key, []).append(f"{statistics.median(took):.1f}" if took else "-")
    for key, numbers in cells.items():
        table.add_row(*key, *numbers)
    Console().print(table)


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    beside = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def _run(work: str, threads: int, seconds: float) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--work", work, "--seconds", str(seconds)]
    chosen = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **chosen})
    return json.loads(done.stdout)


def _measure(work: Work, seconds: float) -> dict[str, list[float]]:
    for run in reversed(work.values()):  # warms up
        run()
    took: dict[str, list[float]] = {}
    for name, run in work.items():
        began = time.perf_counter()
        while not took.get(name) or time.perf_counter() - began < seconds:
            since = time.perf_counter()
            run()
            took.setdefault(name, []).append(round(1000 * (time.perf_counter() - since), 1))
    return took


def _world(backend: str) -> Work:
    world = diagd.VideoGenerator.from_pretrained("doom", backend=backend)
    frames = read_video(model_path("doom") / "prompt.mp4").frames[-2:]

    def generate(strategy: str) -> object:
        context_actions = ["forward"] * (len(frames) - 1)
        return world.generate(
            frames, ["forward"], 1, strategy=strategy, context_actions=context_actions
        )

    return {strategy: lambda s=strategy: generate(s) for strategy in STRATEGIES}


def _hugging_face(_: str) -> Work:
    grid, prompt = TokenGrid(3, 6, 10), torch.zeros(1, 60, dtype=torch.int64)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape = transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=4, max_position_embeddings=512, **sizes
    )
    model = diagd.HuggingFaceModel(transformers.LlamaForCausalLM(shape))

    def generate(strategy: str) -> object:
        return diagd.generate_tokens(model, prompt, strategy, grid=grid)

    return {strategy: lambda s=strategy: generate(s) for strategy in STRATEGIES}


def _training(_: str) -> Work:
    config = PRESETS["mc-ar-doom"]
    model = Transformer.random(config)
    grid = TokenGrid(3, config.grid_height, config.grid_width)
    layout = SequenceLayout(grid, config.num_action_tokens, 1)
    schedule = diagd.parse_strategy("k=1").schedule(grid)
    loss = ViewLoss(teacher_view(schedule, layout, learn_context=True), torch.device("cpu"), False)
    length = 4 * layout.slots_per_frame - config.num_action_tokens
    tokens = torch.randint(config.image_vocab_size, (4, length))

    def step() -> None:
        follow_free_cores()  # as the training loop does
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, tokens)
        value.backward()

    return {"a step": step}


def _play(_: str) -> Work:
    world = diagd.VideoGenerator.from_pretrained("doom", dtype="fastest")
    start = read_video(model_path("doom") / "prompt.mp4").frames[-1:]
    streams = {
        strategy: world.stream(start, itertools.repeat("forward"), strategy=strategy)
        for strategy in STRATEGIES
    }
    return {strategy: lambda frames=frames: next(frames) for strategy, frames in streams.items()}


WORKS: dict[str, Callable[[str], Work]] = {
    "native": _world,
    "eager": _world,
    "hugging face": _hugging_face,
    "training": _training,
    "play": _play,
}

if __name__ == "__main__":
    main(tyro.cli(Options))
