"""What a pass costs by its lanes, and how many lanes pay: measured once for a model on a device."""

import statistics
import time
from weakref import WeakKeyDictionary

import torch

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.plan import Lanes

# Tokens that become final in a pass, by the most lanes it may feed: measured on the bundled model
# at temperature 1, with the drafts that exact decoding makes by default (docs/exact.md).
TOKENS = {1: 1.0, 8: 2.9, 12: 3.64, 16: 4.36, 24: 5.44, 32: 6.32, 40: 7.16, 96: 9.11, 192: 10.77}
NUM_LANES = tuple(TOKENS)
REPEATS = 3
_MEASURED: WeakKeyDictionary[object, dict[tuple[int, bool], dict[int, float]]] = WeakKeyDictionary()


@torch.inference_mode()
def measure_costs(engine: DiagonalEngine) -> dict[int, float]:
    """Time passes of 1 lane and more, until no more lanes can pay: {lanes: seconds}.

    They read the slots in use and write to the scratch slot. The same model with as many batch rows
    is measured once in a process.
    """
    key = len(engine.tokens), engine.pad
    measured = _MEASURED.setdefault(engine.model, {})
    if key not in measured:
        costs: dict[int, float] = {}
        for num_lanes in NUM_LANES:
            costs[num_lanes] = _time(engine, num_lanes)
            least = min(seconds / TOKENS[lanes] for lanes, seconds in costs.items())
            if costs[num_lanes] > least * max(TOKENS.values()):
                break
        measured[key] = costs
    return measured[key]


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the lanes with the most final tokens a second, if it goes as with `TOKENS`.

    Args:
        costs: {lanes: seconds of a pass}.
    """
    return max(costs, key=lambda num_lanes: TOKENS[num_lanes] / costs[num_lanes])


def _time(engine: DiagonalEngine, num_lanes: int) -> float:
    """Return the median seconds of a pass, the first two left out (they compile and capture)."""
    num_slots, scratch = max(engine.num_used, 1), engine.max_slots
    fields = Lanes(*(torch.zeros(num_lanes, dtype=torch.int64) for _ in Lanes._fields))
    lanes = torch.stack(fields._replace(positions=fields.positions + num_slots - 1))
    for name in ("slots", "outputs"):
        lanes[Lanes._fields.index(name)] = scratch
    lanes = lanes.to(engine.tokens.device)
    seconds: list[float] = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        engine.run(lanes, num_slots)
        engine.tokens[0, scratch].item()  # wait for the device
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])
