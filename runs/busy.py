"""Measure decoding, training and play beside busy processes, with PyTorch's threads set and not.

Our kernels, PyTorch's, a model of transformers, training, and frames as `diagd play` shows them.
"free" is what diagd does: as many threads as others leave cores free; "2 set" is what PyTorch does
by itself on two cores. Both take turns in one process. Leave the machine alone but for this.

    python runs/busy.py --out docs/results/zen5/busy.json
"""

import itertools
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
from rich.table import Table

import diagd
from diagd import threads
from diagd.backends.names import Backend
from diagd.data.video import read_video
from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.checkpoints import model_path
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.system import provenance
from diagd.training.mixture import ViewLoss

SPIN = "while True: pass"
STRATEGIES = "raster", "k=1"
Work = dict[str, Callable[[], object]]  # what is timed, by name: a frame each, or a step


@dataclass(frozen=True)
class Options:
    """What is measured."""

    out: Path | None = None  # a JSON file
    busy: tuple[int, ...] = (0, 1, 4)  # busy processes beside it
    works: tuple[str, ...] = ("native", "hugging face", "play", "training", "eager")
    seconds: float = 12.0  # of each work beside each number of processes; two turns at least


def main(options: Options) -> None:
    """Measure every case, and print the median milliseconds of a frame, or of a step."""
    rows: list[dict[str, Any]] = []
    for name in options.works:
        work = WORKS[name](name)
        for run in reversed(work.values()):  # warms up
            run()
        for busy in options.busy:
            with _neighbours(busy):
                for setting, ms in _measure(work, options.seconds).items():
                    rows.append({"work": name, "busy": busy, "threads": setting, "ms": ms})
            if options.out is not None:  # after each, for this takes minutes
                write_json(options.out, {**_about(), "rows": rows}, indent=1)
    _print(rows)


def _about() -> dict[str, Any]:
    return {**provenance(torch.device("cpu")), "threads": threads.threads_when_idle()}


def _measure(work: Work, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by setting and name; settings take turns."""
    rule, most = threads._threads, os.cpu_count() or 1
    took: dict[str, dict[str, list[float]]] = {}
    began = time.monotonic()
    for turn in itertools.count():
        if turn >= 2 and turn % 2 == 0 and time.monotonic() - began > seconds:
            break
        rule.is_chosen = turn % 2 == 1
        torch.set_num_threads(most if rule.is_chosen else rule.number)
        of_turn = took.setdefault(f"{most} set" if rule.is_chosen else "free", {})
        for name, run in work.items():
            since = time.perf_counter()
            run()
            ms = round(1000 * (time.perf_counter() - since), 1)
            of_turn.setdefault(name, []).append(ms)
    rule.is_chosen = False
    torch.set_num_threads(rule.number)
    return took


def _print(rows: list[dict[str, Any]]) -> None:
    loads = list(dict.fromkeys(row["busy"] for row in rows))
    table = Table("work", "threads", *(f"{busy} busy" for busy in loads), box=SIMPLE)
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, ms in row["ms"].items():
            key = f"{row['work']}, {name}", row["threads"]
            cells.setdefault(key, []).append(f"{statistics.median(ms):.0f}")
    for key, numbers in cells.items():
        table.add_row(*key, *numbers)
    Console().print(table)


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    beside = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        time.sleep(1.5 * threads.LOOK_S)  # so that the next look is at them
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def _world(backend: Backend) -> Work:
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
        threads.follow_free_cores()  # as the training loop does
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


WORKS: dict[str, Callable[[Any], Work]] = {
    "native": _world,
    "eager": _world,
    "hugging face": _hugging_face,
    "training": _training,
    "play": _play,
}

if __name__ == "__main__":
    main(tyro.cli(Options))
