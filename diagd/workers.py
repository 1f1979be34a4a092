"""Tasks run by this process, or by several Ray processes on one machine or a cluster.

Every process makes its worker once, such as a loaded model. Ray restarts a process that dies and
repeats its task. Results return to the calling process, which alone writes them.
"""

import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from diagd.checks import check_at_least, shorten
from diagd.extras import require

Task = TypeVar("Task")
Result = TypeVar("Result")
Worker = Callable[[Task], Result]

RETRIES = 3  # of a task whose process crashed


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of worker processes, each with a share of the machine."""

    workers: int = 1  # number of processes that share the work (Ray); 1: only this one
    worker_cpus: float = 1  # CPUs per worker
    worker_gpus: float = 0  # GPUs per worker
    # address of a Ray cluster with the same folders, such as ray://head:10001; default: start one
    address: str | None = None

    def __post_init__(self) -> None:
        check_at_least(self, workers=1, worker_cpus=0, worker_gpus=0)

    @property
    def is_this_process(self) -> bool:
        return self.workers == 1 and self.address is None


def do_tasks(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    """Yield each task, once done, with its result or error; errors of `make` are raised.

    Tasks, results and `make`, which returns a process's worker, must be picklable.
    """
    if not tasks:
        return
    if pool.is_this_process or (len(tasks) == 1 and pool.address is None):
        worker = make()
        for task in tasks:
            yield task, _attempt(worker, task)
    else:
        yield from _do_with_ray(tasks, make, pool)


def _attempt(worker: Worker[Task, Result], task: Task) -> Result | ValueError:
    """Return a user's mistake as a result, so that other tasks continue."""
    try:
        return worker(task)
    except (ValueError, OSError) as error:
        return ValueError(shorten(str(error)))


class _Actor:
    """A Ray process in which relative paths mean the same as here."""

    def __init__(
        self, make: Callable[[], Worker[Any, Any]], num_threads: int, folder: Path
    ) -> None:
        import torch  # here, like ray: the command line uses `Pool` as well

        torch.set_num_threads(num_threads)
        with suppress(OSError):  # a machine without that folder may still have absolute paths
            os.chdir(folder)
        self._make, self._worker = make, None

    def do(self, number: int, task: Any) -> tuple[int | None, Any]:
        """Return a task's number and result, or None and the error of making the worker."""
        try:
            self._worker = self._worker or self._make()
        except (ValueError, OSError) as error:  # one line, not Ray's forty
            return None, ValueError(str(error))
        return number, _attempt(self._worker, task)


def _do_with_ray(
    tasks: Sequence[Task], make: Callable[[], Worker[Task, Result]], pool: Pool
) -> Iterator[tuple[Task, Result | ValueError]]:
    require("--workers", "ray")
    ray = start_ray(pool.address)
    from ray.exceptions import RayActorError
    from ray.util import ActorPool

    count, cpus, gpus = min(pool.workers, len(tasks)), pool.worker_cpus, pool.worker_gpus
    try:
        check_resources(count, {"CPU": cpus, "GPU": gpus}, ray.cluster_resources())
        start: Any = ray.remote(_Actor).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        arguments = make, max(1, math.ceil(cpus)), Path.cwd()
        actors = ActorPool([start.remote(*arguments) for _ in range(count)])
        left = dict(enumerate(tasks))
        for job in left.items():
            actors.submit(lambda actor, job: actor.do.remote(*job), job)
        while actors.has_next():
            with suppress(RayActorError):  # its task stays among the remaining ones
                number, result = actors.get_next_unordered()
                if number is None:
                    raise result
                yield left.pop(number), result
        for task in left.values():
            yield task, ValueError(f"worker process crashed {1 + RETRIES} times on this task")
    finally:
        ray.shutdown()


def start_ray(address: str | None) -> Any:
    """Import Ray, and start it here or join a cluster; `ray.shutdown` ends it."""
    if address is None:  # Ray's processes listen on the network: require a token
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_AUTH_MODE"] = "token"
    import ray  # slow to import, and one process does not need it

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:  # also: the token that the cluster asks for is missing
        why = f"{shorten(str(error))} (RAY_AUTH_MODE=token if it asks for a token)"
        raise ValueError(f"cannot join a Ray cluster at {address}: {why}") from None
    return ray


def check_resources(
    count: int, shares: Mapping[str, float], available: Mapping[str, float]
) -> None:
    """Reject more workers than there is room for: Ray would wait forever."""
    for kind, share in shares.items():
        if count * share > available.get(kind, 0):
            raise ValueError(
                f"{count} workers of {share:g} {kind}s each need more than the "
                f"{available.get(kind, 0):g} available"
            )
