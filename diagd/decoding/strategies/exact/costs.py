"""What a step costs by its lanes, and how many lanes pay: measured once for a model on a device."""

import statistics
import time
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from diagd.decoding.strategies.exact.statistics import BUNDLED

DryStep = Callable[[int], object]
Clock = Callable[[DryStep, int], float]
REPEATS = 5
_MEASURED: WeakKeyDictionary[object, dict[Hashable, dict[int, float]]] = WeakKeyDictionary()


def median_seconds(dry_step: DryStep, num_lanes: int) -> float:
    """Return the median seconds of a step, the first two left out (they compile and capture)."""
    seconds: list[float] = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        dry_step(num_lanes)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def measure_costs(
    model: object, kind: Hashable, dry_step: DryStep, clock: Clock = median_seconds
) -> dict[int, float]:
    """Time steps of 1 lane and more, until no more lanes can pay: {lanes: seconds}.

    Args:
        model: measured once in a process for each `kind` of step.
        dry_step: does all that a step of so many lanes does, waits for it, and leaves no trace.
    """
    measured = _MEASURED.setdefault(model, {})
    if kind not in measured:
        costs: dict[int, float] = {}
        tokens = dict(BUNDLED.tokens_per_step)
        for num_lanes in BUNDLED.num_lanes:
            costs[num_lanes] = clock(dry_step, num_lanes)
            least = min(seconds / tokens[lanes] for lanes, seconds in costs.items())
            if costs[num_lanes] > least * max(tokens.values()):
                break
        measured[kind] = costs
    return measured[kind]


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the lanes with the most final tokens a second, if drafts fare as `BUNDLED` says.

    Args:
        costs: {lanes: seconds of a step}.
    """
    tokens = dict(BUNDLED.tokens_per_step)
    return max(costs, key=lambda num_lanes: tokens[num_lanes] / costs[num_lanes])
