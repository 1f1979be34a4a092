"""What this machine can do at best: reading or copying memory, and multiplying matrices."""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diagd.backends.merged_linears import multiplies_packed
from diagd.backends.native.library import load_library
from diagd.decoding.generate_tokens import synchronized_time

_STREAM_NUMBERS = 2**28  # float32: 1 GiB, larger than any cache
_MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    Attributes:
        bytes_per_second: on the CPU, reading 1 GiB, front to back, with all threads; on a GPU, a
            plain copy of 1 GiB, which counts twice: read and written.
        flops_per_second: a square matrix product, of the fastest number type.
    """

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(device: torch.device, *dtypes: torch.dtype) -> Ceilings:
    """Measure both, the best of five runs each.

    bfloat16 is left to float32 where oneDNN does not multiply it: PyTorch's own loop takes minutes.
    """
    if device.type == "cpu" and not multiplies_packed(torch.bfloat16):
        dtypes = (torch.float32,)
    stream, moved = _stream(torch.ones(_STREAM_NUMBERS, device=device))
    size = _MATRIX_SIZE[device.type]
    seconds = list[float]()
    for dtype in dtypes:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds.append(_fastest(lambda matrix=matrix: matrix @ matrix, device))
    return Ceilings(
        bytes_per_second=moved / _fastest(stream, device),
        flops_per_second=2 * size**3 / min(seconds),
    )


def _stream(numbers: torch.Tensor) -> tuple[Callable[[], object], int]:
    """Return a function that goes through the numbers once, and how many bytes it moves.

    On the CPU it reads them, with our own loop where it can be built.
    """
    if numbers.device.type != "cpu":
        goal = torch.empty_like(numbers)
        return lambda: goal.copy_(numbers), 2 * numbers.nbytes
    try:
        stream = load_library().stream
    except OSError:
        return numbers.sum, numbers.nbytes
    return lambda: stream(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_int64(numbers.numel()),
        torch.get_num_threads(),
    ), numbers.nbytes


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = synchronized_time(device)
        run()
        seconds.append(synchronized_time(device) - started)
    return min(seconds)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 99th percentile, least and most."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "min": ordered[0],
        "max": ordered[-1],
    }
