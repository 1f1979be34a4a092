"""Memory in huge pages, where Linux gives them.

Whoever reads all weights at every step goes through thousands of small pages, and looks up most of
them anew; in huge ones a step of one lane takes a few percent less (docs/log.md).
"""

import ctypes
import sys

import torch
from torch import Tensor

PAGE = 2**21  # bytes
CHUNK = 32 * PAGE
ALIGNED = 64  # bytes, as the kernels read
MADV_HUGEPAGE = 14  # of Linux


class HugePages:
    """Where tensors that live and die together are put one after the other.

    Memory is asked of the system in chunks; what is never written takes none.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor, here."""
        place = self._take(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return place.view(tensor.shape).copy_(tensor)

    def _take(self, count: int) -> Tensor:
        size = -(-count // ALIGNED) * ALIGNED
        if size > len(self._free):
            self._free = _chunk(max(size, CHUNK))
        taken, self._free = self._free[:count], self._free[size:]
        return taken


def _chunk(size: int) -> Tensor:
    """Return bytes that begin with a page, and are to lie in huge ones."""
    size = -(-size // PAGE) * PAGE
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][:size]
    if sys.platform == "linux":  # refused, it lies in small ones
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return memory
