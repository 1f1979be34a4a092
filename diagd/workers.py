"""Tasks done by this process, or by several that Ray starts on one machine or a cluster.

Every process makes its worker once, such as a model that is loaded, and then does one task after
the other. Ray restarts one that dies, and does its task again. Results return to the process that
asked, which alone writes them, so they are those of one process, in another order.
"""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from diagd.checks import shorten
from diagd.extras import require

Task = TypeVar("Task")
Result = TypeVar("Result")
Worker = Callable[[Task], Result]

RETRIES = 3  # of a task whose process died


@dataclass(frozen=True)
class Pool:
    """Processes that work, and the share of a machine that each may use."""

    size: int = 1  # one without an address is this process itself, without Ray
    cpus: float = 1  # of each that Ray starts; it runs ceil(cpus) threads
    gpus: float = 0
    # of a cluster, such as `auto` or `ray://head:10001`; None starts one here. Its machines have
    # diagd installed, and find the files of tasks under the same paths
    address: str | None = None

    def __post_init__(self) -> None:
        for name, value, lowest in (
            ("workers", self.size, 1),
            ("worker_cpus", self.cpus, 0),
            ("worker_gpus", self.gpus, 0),
        ):
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")

    @property
    def is_this_process(self) -> bool:
        return self.size == 1 and self.address is None


def do_tasks(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    """Yield each task with its result, in the order they are done, or with its error.

    Tasks, results and `make`, which returns the worker of a process, are picklable. A worker that
    cannot be made raises its ValueError or OSError.
    """
    if not tasks:
        return
    pool = replace(pool, size=min(pool.size, len(tasks)))
    if not pool.is_this_process:
        yield from _do_with_ray(tasks, make, pool)
        return
    worker = make()
    for task in tasks:
        yield task, _attempt(worker, task)


def _attempt(worker: Worker[Task, Result], task: Task) -> Result | ValueError:
    """Return a user's mistake as a result, so that the other tasks go on."""
    try:
        return worker(task)
    except (ValueError, OSError) as error:
        return ValueError(shorten(str(error)))


class _Actor:
    """A process of Ray's, in which relative paths mean the same as here."""

    def __init__(
        self, make: Callable[[], Worker[Any, Any]], num_threads: int, folder: Path
    ) -> None:
        import torch  # here, as ray: `Pool` is for the command line, too

        torch.set_num_threads(num_threads)
        with suppress(OSError):  # a machine without that folder may have what has a whole path
            os.chdir(folder)
        self._make, self._worker = make, None

    def do(self, task: Any) -> tuple[bool, Any]:
        """Return whether the worker could be made, and its result, or the error of making it."""
        try:
            self._worker = self._worker or self._make()
        except (ValueError, OSError) as error:  # one line, not Ray's forty
            return False, ValueError(str(error))
        return True, _attempt(self._worker, task)


def _do_with_ray(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    require("--workers", "ray")
    import ray  # takes seconds, and one process needs none
    from ray.exceptions import RayActorError

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address=pool.address,
        include_dashboard=False if pool.address is None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        _check_resources(pool, ray.cluster_resources())  # Ray would wait for ever
        start: Any = ray.remote(_Actor).options(
            num_cpus=pool.cpus, num_gpus=pool.gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        arguments = make, max(1, math.ceil(pool.cpus)), Path.cwd()
        idle = [start.remote(*arguments) for _ in range(pool.size)]
        left, running = iter(tasks), {}
        while True:
            for task in itertools.islice(left, len(idle)):
                actor = idle.pop()
                running[actor.do.remote(task)] = actor, task
            if not running:
                return
            (done, *_), _ = ray.wait(list(running))
            actor, task = running.pop(done)
            idle.append(actor)
            try:
                is_made, result = ray.get(done)
            except RayActorError:
                is_made, result = True, ValueError(f"{1 + RETRIES} processes died of it")
            if not is_made:
                raise result
            yield task, result
    finally:
        ray.shutdown()


def _check_resources(pool: Pool, available: Mapping[str, float]) -> None:
    for kind, share in (("CPU", pool.cpus), ("GPU", pool.gpus)):
        if pool.size * share > available.get(kind, 0):
            raise ValueError(
                f"{pool.size} workers of {share:g} {kind}s each need more than the "
                f"{available.get(kind, 0):g} there are"
            )
