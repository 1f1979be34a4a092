"""Sampling options, validated before any computation."""

from dataclasses import dataclass
from typing import Any

_MIN = 2.0**-100  # smallest temperature and top_p: below, they or the logits leave float32


@dataclass(frozen=True)
class SamplingOptions:
    """Temperature and truncation of sampling.

    Attributes:
        temperature: 0 or more; 0 is greedy (lowest id on ties).
            top_k: keep the k most likely ids (and ties with the last of them), at least 1. None:
                all.
            top_p: keep the most likely ids until their mass reaches top_p, in (0, 1]. None: all.
            valid_range: ids that may be sampled, low <= id < high: one pair for all places, or an
                int tensor (height, width, 2) with a pair for each place of the frame. None: all
                ids.
            exclusive_top_p: also drop the id with which the mass crosses top_p, unless it is the
                most likely one (WHAM's rule).

    Raises:
        ValueError: a value out of range, or truncation at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    valid_range: tuple[int, int] | Any = None
    exclusive_top_p: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k must be an int of at least 1, got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        for name in ("temperature", "top_p"):
            if (value := getattr(self, name)) and value < _MIN:
                raise ValueError(f"{name} above 0 must be at least 2**-100, got {value}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature above 0, got temperature 0")
