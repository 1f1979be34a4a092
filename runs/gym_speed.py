"""How many steps a second does a world make as a Gymnasium environment?

Single episodes and batches of them, in each number type, take turns; the fastest round counts. A
step is one frame of one episode, k=1, with as many frames in the context as the world remembers.

    python runs/gym_speed.py --out docs/results    # gym_speed.json
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from diagd.backends.names import DTypeChoice
from diagd.console import make_console, print_records
from diagd.files import write_json
from diagd.gym import GymVectorEnv
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance, settings_of


@dataclass(frozen=True)
class Options:
    """Step through a world, and write how fast that was."""

    out: Path  # folder for gym_speed.json
    world: str = "doom"
    dtypes: tuple[DTypeChoice, ...] = ("float32", "auto", "fastest")
    num_envs: tuple[int, ...] = (1, 4)
    rounds: int = 3
    steps: int = 8  # of a round


def main(options: Options) -> dict[str, Any]:
    """Time every environment in turns; returns the document written."""
    rows = list[dict[str, Any]]()
    envs = list[GymVectorEnv]()
    for dtype in options.dtypes:
        world = VideoGenerator.from_pretrained(options.world, dtype=dtype)
        for count in options.num_envs:
            envs.append(GymVectorEnv(world, count))
            rows.append({"dtype": dtype, "used": world.dtype, "num_envs": count, "rates": []})
    for env in envs:  # until the context is full
        env.reset(seed=0)
        walk(env, env.world.config.frames_held)
    for _ in range(options.rounds):
        for env, row in zip(envs, rows, strict=True):
            row["rates"].append(env.num_envs * options.steps / walk(env, options.steps))
    for row in rows:
        row["steps_per_second"] = round(max(row.pop("rates")), 2)
    columns = {name: f"{{{name}}}" for name in ("dtype", "used", "num_envs", "steps_per_second")}
    print_records(make_console(), f"{options.world}: steps a second of all episodes", columns, rows)
    document = {
        "options": settings_of(options),
        **provenance(torch.device("cpu")),
        "rows": rows,
    }
    write_json(options.out / "gym_speed.json", document, indent=1)
    return document


def walk(env: GymVectorEnv, steps: int) -> float:
    """Do so many random steps; return the seconds that they took."""
    draw, started = np.random.default_rng(0), time.perf_counter()
    for _ in range(steps):
        env.step(draw.integers(len(env.names), size=env.num_envs))
    return time.perf_counter() - started


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
