"""Candidates that would take so long, in place of those that were timed here."""

from diagd.backends import prepare
from diagd.backends.names import Backend, DTypeName
from diagd.backends.step_times import StepTimes

# Float32 on our kernels is the fastest, bfloat16 on PyTorch's, and the other way round
FLOAT32, BFLOAT16 = (1.0, 9.0, 9.0, 9.0, 9.0), (9.0, 9.0, 9.0, 5.0, 1.0)


def candidates_of(*costs: float) -> list[prepare.Candidate]:
    """Return every candidate with its cost: native in three types, then eager in two."""
    kinds: list[tuple[Backend, DTypeName]] = [
        (backend, dtype) for backend, dtypes in prepare._CANDIDATES.items() for dtype in dtypes
    ]
    pairs = zip(kinds, costs, strict=True)
    return [prepare.Candidate(*kind, StepTimes(cost, cost)) for kind, cost in pairs]
