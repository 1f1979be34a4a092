"""Measure on many processes with Ray Data: actors that load once, on one machine or a cluster.

An actor that dies is started again and its clip measured again, by Ray. Lines come back to the one
process that writes, so the results are those of a single process, in another order.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diagd.evaluation.measure import ClipMeter, Outcome, Settings, Task
from diagd.extras import require


@dataclass(frozen=True)
class Pool:
    """How many actors, and how much of the machine each may use.

    Attributes:
        size: number of actors.
        cpus, gpus: share of each; it runs ceil(cpus) threads.
        address: of a cluster, such as `auto` or `ray://head:10001`; None starts one here.
    """

    size: int
    cpus: float
    gpus: float
    address: str | None


class _Actor:
    """A worker process. Rows are plain values, so that Arrow carries them whatever their sizes."""

    def __init__(self, settings: Settings, num_threads: int, with_frames: bool) -> None:
        torch.set_num_threads(num_threads)
        self._settings, self._with_frames = settings, with_frames
        self._measure: ClipMeter | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            self._measure = self._measure or ClipMeter(self._settings)
            outcome = self._measure(Task(**row))
        except (ValueError, OSError) as error:  # the user's mistakes: one line, not Ray's forty
            return {"error": str(error), "record": "", "pixels": b"", "shape": [0]}
        frames = outcome.frames if self._with_frames else outcome.frames[:0]
        return {
            "error": "",
            "record": json.dumps(outcome.record),
            "pixels": frames.contiguous().numpy().tobytes(),
            "shape": list(frames.shape),
        }


def measure_on_workers(
    settings: Settings, tasks: Sequence[Task], pool: Pool, with_frames: bool
) -> Iterator[Outcome]:
    """Yield an outcome for each task, as they come; without frames where nobody wants them.

    Raises:
        ValueError: what a worker could not measure, more CPUs or GPUs than there are, or no Ray.
    """
    require("--workers", "ray")
    import ray  # takes seconds, and one process needs none
    import ray.data

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address=pool.address,
        include_dashboard=False if pool.address is None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        _check_resources(pool, ray.cluster_resources())
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        actor: Any = _Actor  # Ray makes the instances; its annotation speaks of functions only
        rows = ray.data.from_items(
            [task._asdict() for task in tasks], override_num_blocks=len(tasks)
        ).map(
            actor,
            fn_constructor_args=(settings, max(1, math.ceil(pool.cpus)), with_frames),
            compute=ray.data.ActorPoolStrategy(size=pool.size),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
        )
        for row in rows.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            pixels = np.frombuffer(row["pixels"], np.uint8).reshape(row["shape"]).copy()
            yield Outcome(json.loads(row["record"]), torch.from_numpy(pixels))
    finally:
        ray.shutdown()


def _check_resources(pool: Pool, there: Mapping[str, float]) -> None:
    """Raise now: Ray would wait for what never comes."""
    for kind, share in (("CPU", pool.cpus), ("GPU", pool.gpus)):
        if pool.size * share > there.get(kind, 0):
            raise ValueError(
                f"{pool.size} workers of {share:g} {kind}s each need more than the "
                f"{there.get(kind, 0):g} there are"
            )
