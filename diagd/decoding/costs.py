"""What a pass costs by its lanes, and how many lanes pay: measured once for a model on a device."""

import statistics
import time
from weakref import WeakKeyDictionary

import torch

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.plan import Lanes

NUM_LANES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REPEATS = 3
# Tokens that become final in a pass grow with its lanes to this power, from 8 to 96 lanes: measured
# on the bundled model, sampled and greedy (docs/exact.md).
GAIN = 0.5
_MEASURED: WeakKeyDictionary[object, dict[tuple[int, bool], dict[int, float]]] = WeakKeyDictionary()


@torch.inference_mode()
def measure_costs(engine: DiagonalEngine) -> dict[int, float]:
    """Time passes of 8 lanes and more until they get expensive: {lanes: seconds}.

    They read the slots in use and write to the scratch slot. The same model with as many batch rows
    is measured once in a process.
    """
    key = len(engine.tokens), engine.pad
    measured = _MEASURED.setdefault(engine.model, {})
    if key not in measured:
        costs: dict[int, float] = {}
        for num_lanes in NUM_LANES:
            costs[num_lanes] = _time(engine, num_lanes)
            if costs[num_lanes] > 3 * costs[NUM_LANES[0]]:
                break
        measured[key] = costs
    return measured[key]


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the lanes with the most final tokens a second, by the rule of thumb `GAIN`.

    Args:
        costs: {lanes: seconds of a pass}.
    """
    return max(costs, key=lambda num_lanes: num_lanes**GAIN / costs[num_lanes])


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
