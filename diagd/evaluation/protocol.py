"""What is compared: the paper's protocols, schedules by name, and the seed of a clip."""

import re
import zlib
from dataclasses import dataclass
from typing import Any, get_args

from diagd.decoding.plan import RowStart
from diagd.evaluation.results import RASTER


@dataclass(frozen=True)
class Protocol:
    """How long clips are and how many (arXiv:2503.14070, section 4.1.2)."""

    num_clips: int
    frames: int  # of a clip, the given ones included
    context_frames: int  # given
    fps: float | None = None  # that clips should have


EXACT = "exact"
PROTOCOLS = {
    "cosmos": Protocol(100, 33, 9),  # RealEstate10K at 640x1024
    "wham": Protocol(100, 100, 10, fps=10),
    "mc-ar": Protocol(100, 16, 1),  # VPT
}


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule by name: `raster`, `k=1`, `k=1,d=24` (frames overlap), `k=1/predecessor`, `exact`.

    Attributes:
        row_lag: None is raster.
        frame_lag: None finishes a frame before the next begins.
        exact: raster's tokens by parallel passes.
    """

    row_lag: int | None
    frame_lag: int | None
    row_start: RowStart
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> "ScheduleSpec":
        """Read a name.

        Raises:
            ValueError: no such schedule or row start.
        """
        if text == EXACT:
            return cls(None, None, "temporal", exact=True)
        name, slash, row_start = text.partition("/")
        match = re.fullmatch(r"raster|k=(\d+)(?:,d=(\d+))?", name, flags=re.ASCII)
        if not match or (name == RASTER and slash):
            raise ValueError(
                "schedule must look like raster, exact, k=2, k=1,d=24 or k=1/predecessor, "
                f"got {text!r}"
            )
        choices = {choice: choice for choice in get_args(RowStart)}
        if slash and row_start not in choices:
            raise ValueError(f"row start must be one of {', '.join(choices)}, got {row_start!r}")
        row_lag, frame_lag = (int(lag) if lag else None for lag in match.groups())
        return cls(row_lag, frame_lag, choices[row_start or "temporal"])

    @property
    def lags(self) -> dict[str, Any]:
        """What `VideoGenerator.schedule` takes."""
        if self.row_lag is None:
            return {"raster": True}
        return {"row_lag": self.row_lag, "frame_lag": self.frame_lag}

    @property
    def name(self) -> str:
        """The one spelling of this schedule."""
        if self.row_lag is None:
            return EXACT if self.exact else RASTER
        lags = f"k={self.row_lag}" + ("" if self.frame_lag is None else f",d={self.frame_lag}")
        return lags if self.row_start == "temporal" else f"{lags}/{self.row_start}"


def seed_of(clip: str, seed: int) -> int:
    """Return a clip's seed: the same under every schedule and whatever other clips there are."""
    return (zlib.crc32(clip.encode()) + seed) % 2**31
