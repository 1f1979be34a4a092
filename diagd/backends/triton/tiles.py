"""Tiles of a product: chosen from a table, and where there is a card, by measuring once.

What was measured is kept with the compiled kernels, so that the next process computes the same.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.testing import do_bench

from diagd.backends.native.library import cache_folder
from diagd.files import read_json_object, write_json

NUM_PROGRAMS = 132  # that keep a GPU busy: the multiprocessors of an H100
MIN_PART = 256  # inner numbers of a program; shorter parts do not pay for adding
MAX_SPLITS = 8


class Tile(NamedTuple):
    """What a program multiplies, as constants of a kernel."""

    OUTPUTS: int  # pairs of outputs
    LANES: int
    CHUNK: int  # inner numbers at once
    SPLITS: int  # programs that share the inner numbers
    num_warps: int
    num_stages: int  # chunks on their way


def lane_tile(lanes: int, item_size: int) -> int:
    widest = 32 if item_size == 4 else 128  # without tensor cores a whole product is in registers
    return min(widest, next((size for size in (16, 32, 64) if lanes <= size), 128))


def splits_of(programs: int, inner: int) -> int:
    """Return into how many parts the inner dimension is split: until a GPU is busy."""
    splits = 1
    while (
        splits < MAX_SPLITS and programs * splits < NUM_PROGRAMS and inner >= 2 * splits * MIN_PART
    ):
        splits *= 2
    return splits


def tile_of(lanes: int, pairs: int, inner: int, item_size: int, whole: int | None = None) -> Tile:
    """Choose the tile of a layer from what is known of GPUs.

    Args:
        pairs: pairs of outputs. item_size: bytes of an activation.
        whole: pairs of a head, if a program must have a whole one.
    """
    width = lane_tile(lanes, item_size)
    size = whole or (32 if width >= 64 else 16)  # more lanes: more outputs for each reading of x
    chunk = min(16 if item_size == 4 else 64, max(16, triton.next_power_of_2(inner)))
    programs = triton.cdiv(pairs, size) * triton.cdiv(lanes, width)
    # the products of a wide tile would fill the registers of 4 warps
    warps, stages = (8, 3) if size * width >= 2048 else (4, 4)
    return Tile(size, width, chunk, splits_of(programs, inner), warps, stages)


def candidates(tile: Tile) -> list[Tile]:
    """Return tiles to measure beside one of the table, which is the first."""
    found = [tile]
    for splits in (tile.SPLITS // 2, tile.SPLITS * 2):
        found += [tile._replace(SPLITS=splits)] * (1 <= splits <= MAX_SPLITS)
    found += [tile._replace(CHUNK=2 * tile.CHUNK), tile._replace(num_warps=12 - tile.num_warps)]
    return [*found, tile._replace(num_stages=7 - tile.num_stages)]


class Tiles:
    """The tiles of a device's products; measured on the first use, where the device is real."""

    def __init__(self, device: torch.device) -> None:
        self.measures = device.type == "cuda" and torch.version.cuda is not None
        self.measures &= os.environ.get("TRITON_INTERPRET") != "1"
        self.known: dict[str, Tile] = {}
        if self.measures:
            self._path = cache_folder() / f"tiles-{_digest(device)}.json"
            with suppress(OSError, ValueError, TypeError):  # missing or damaged: measured again
                self.known = {
                    name: Tile(*tile) for name, tile in read_json_object(self._path).items()
                }

    def choose(self, name: str, tile: Tile, run: Callable[[Tile], object]) -> Tile:
        """Return the fastest tile for a product, or the table's where nothing can be measured.

        Args:
            name: everything that the time depends on besides the table's tile.
        """
        if not self.measures or torch.cuda.is_current_stream_capturing():
            return tile
        name = f"{name}: {tile}"
        if name not in self.known:
            times = {one: _milliseconds(partial(run, one)) for one in candidates(tile)}
            self.known[name] = min(times, key=lambda one: times[one])
            with suppress(OSError):  # if it cannot be kept, the next process measures again
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, self.known)
        return self.known[name]


def _milliseconds(run: Callable[[], object]) -> float:
    try:
        return do_bench(run, warmup=2, rep=10)  # weights are read from memory each time
    except triton.TritonError:  # more than this GPU has, or its assembler takes
        return math.inf


def _digest(device: torch.device) -> str:
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    parts = torch.cuda.get_device_name(device), triton.__version__, sources
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
