"""Many tasks, done by this process or by several that Ray starts, on one machine or a cluster.

Every process makes its worker once, such as a model that is loaded, and then does one task after
the other. One that dies is started again and its task done again, by Ray. Results come back to the
process that asked, which alone writes, so they are those of one process, in another order.
"""

import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from diagd.extras import require

Task = TypeVar("Task")
Result = TypeVar("Result")
Worker = Callable[[Task], Result]


@dataclass(frozen=True)
class Pool:
    """Who does the work, and how much of a machine each may use.

    Attributes:
        size: number of processes; one without an address is this process itself, without Ray.
        cpus, gpus: share of each that Ray starts; it runs ceil(cpus) threads.
        address: of a cluster, such as `auto` or `ray://head:10001`; None starts one here. Its
            machines have diagd installed, and find what tasks name under the same paths.
    """

    size: int = 1
    cpus: float = 1
    gpus: float = 0
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
        """Whether the work is done here, which needs no Ray."""
        return self.size == 1 and self.address is None


def do_tasks(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    """Yield each task with its result, as they come, or with what was wrong with it.

    Args:
        tasks: picklable, and so are their results.
        make: returns the worker of a process; picklable.

    Raises:
        ValueError, OSError: a worker cannot be made, more CPUs or GPUs than there are, or no Ray.
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
    """Do a task; a mistake of the user's is a result, too, so that the other tasks go on."""
    try:
        return worker(task)
    except (ValueError, OSError) as error:
        return ValueError(str(error))


class _Actor:
    """A process of Ray's. Rows are plain values, so that Arrow carries them whatever is inside."""

    def __init__(self, make: Callable[[], Worker[Any, Any]], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._make, self._worker = make, None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            self._worker = self._worker or self._make()
        except (ValueError, OSError) as error:  # one line, not Ray's forty
            return {"refused": str(error), "done": b""}
        task = pickle.loads(row["task"])
        return {"refused": "", "done": pickle.dumps((task, _attempt(self._worker, task)))}


def _do_with_ray(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    require("--workers", "ray")
    import ray  # takes seconds, and one process needs none
    import ray.data

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised as well
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
            [{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=len(tasks)
        ).map(
            actor,
            fn_constructor_args=(make, max(1, math.ceil(pool.cpus))),
            compute=ray.data.ActorPoolStrategy(size=pool.size),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
        )
        for row in rows.iter_rows():
            if row["refused"]:
                raise ValueError(row["refused"])
            yield pickle.loads(row["done"])
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
