"""What a pass costs by its lanes, and how many lanes pay: measured once for a model on a device."""

import statistics
import time
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

DryPass = Callable[[int], object]
# Tokens that become final in a pass, by the most lanes it may feed: measured on the bundled model
# at temperature 1, with the drafts that exact decoding makes by default (docs/exact.md).
TOKENS = {1: 1.0, 8: 2.9, 12: 3.64, 16: 4.36, 24: 5.44, 32: 6.32, 40: 7.16, 96: 9.11, 192: 10.77}
NUM_LANES = tuple(TOKENS)
REPEATS = 5
_MEASURED: WeakKeyDictionary[object, dict[Hashable, dict[int, float]]] = WeakKeyDictionary()


def measure_costs(model: object, kind: Hashable, dry_pass: DryPass) -> dict[int, float]:
    """Time passes of 1 lane and more, until no more lanes can pay: {lanes: seconds}.

    Args:
        model: measured once in a process for each `kind` of pass.
        dry_pass: does all that a pass of so many lanes does, waits for it, and leaves no trace.
    """
    measured = _MEASURED.setdefault(model, {})
    if kind not in measured:
        costs: dict[int, float] = {}
        for num_lanes in NUM_LANES:
            costs[num_lanes] = _time(dry_pass, num_lanes)
            least = min(seconds / TOKENS[lanes] for lanes, seconds in costs.items())
            if costs[num_lanes] > least * max(TOKENS.values()):
                break
        measured[kind] = costs
    return measured[kind]


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the lanes with the most final tokens a second, if it goes as with `TOKENS`.

    Args:
        costs: {lanes: seconds of a pass}.
    """
    return max(costs, key=lambda num_lanes: TOKENS[num_lanes] / costs[num_lanes])


def _time(dry_pass: DryPass, num_lanes: int) -> float:
    """Return the median seconds of a pass, the first two left out (they compile and capture)."""
    seconds: list[float] = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        dry_pass(num_lanes)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])
