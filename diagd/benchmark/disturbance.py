"""Tell a row that was disturbed: its measurements contradict each other.

Rows run in turns, so a machine that is slow throughout slows all of them alike. What that cannot
even out is another process that takes the machine for a moment. The bounds are far from what
undisturbed rows showed (docs/results/bench_cpu.jsonl), so that none of those is marked.
"""

from collections.abc import Sequence
from typing import Any

MARK = "!"

# Repeats do the same work; undisturbed, the slowest took at most 1.26 times as long as the fastest.
# One that takes twice as long had half of the machine.
MAX_REPEATS_APART = 2.0

# Steps differ in lanes and in slots that they see, so the slowest take up to 3 times the median.
# From 10 times on, one step in a hundred adds a tenth to the time of all.
MAX_TAIL = 10.0

# The parts of a step are means over all repeats; the milliseconds of a step are the median
# repeat's. Undisturbed, the parts added up to at most 1.1 times those.
MAX_PARTS_OVER_STEP = 1.5


def is_disturbed(row: dict[str, Any]) -> bool:
    """Say whether a row of the report (see `report_rows`), of whatever age, contradicts itself."""
    steps, parts = row.get("step_ms"), row.get("parts_ms", {})
    whole = sum(parts.get(part, 0.0) for part in ("forward", "sampling", "bookkeeping"))
    return (
        row["seconds_max"] > MAX_REPEATS_APART * row["seconds_min"]
        or (steps is not None and steps["p99"] > MAX_TAIL * steps["p50"])
        or whole > MAX_PARTS_OVER_STEP * row["ms_per_step"]
    )


def disturbed_note(names: Sequence[str]) -> str:
    """Return the line under a table for the rows marked in it."""
    return f"{MARK} disturbed: {', '.join(names)} (times contradict each other): measure again"
