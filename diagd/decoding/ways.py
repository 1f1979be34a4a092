"""Ways to decode by name: one vocabulary for `diagd evaluate`, `diagd bench` and the scripts.

    raster                            next-token prediction
    k=2  k=1,d=24  k=1/predecessor    diagonals: row_lag, frame_lag (frames overlap), row start
    zipar=4  zipar-adaptive=4         ZipAR with that window (k=4/spatial), or with it at least
    exact  exact,lanes=32             raster's tokens by parallel passes of so many lanes
    jacobi  jacobi,lanes=96           the same without drafts
    tolerance=1.5                     a guess stays that 1.5 times its probability would draw
    sjd  mc-sjd,lanes=96              speculative Jacobi decoding, and with maximal coupling

Without lanes, `exact` and `jacobi` measure what a pass costs; what they write does not depend on
it. What the last three write does, so theirs are `LANES`, whatever the machine.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from diagd.decoding.exact import ExactOptions
from diagd.decoding.generate import EngineOptions
from diagd.decoding.plan import RowStart, check_row_start
from diagd.decoding.rules import Rule
from diagd.decoding.runner import RunnerName
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.zipar import AdaptiveWindow

LANES = 32
_NAME = re.compile(
    r"raster"
    r"|k=(?P<k>\d+)(,d=(?P<d>\d+))?(/(?P<row_start>\w*))?"
    r"|(?P<zipar>zipar|zipar-adaptive)=(?P<window>\d+)"
    r"|((?P<kind>exact|jacobi|sjd|mc-sjd)|tolerance=(?P<tolerance>\d+(\.\d+)?))(,lanes=(?P<lanes>\d+))?",
    flags=re.ASCII,
)


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: its one spelling.
        row_lag: None is raster, for exact ways as well.
        frame_lag: None finishes a frame before the next begins.
        exact: what `generate_tokens` takes: another engine than the schedule's.
        lossless: whether raster's tokens are written, or others of raster's distribution.
    """

    name: str
    row_lag: int | None = None
    frame_lag: int | None = None
    row_start: RowStart = "temporal"
    exact: EngineOptions = False
    lossless: Literal["tokens", "distribution", "no"] = "no"

    @classmethod
    def parse(cls, text: str) -> "Way":
        """Read a name.

        Raises:
            ValueError: no such way, or a number that it cannot have.
        """
        match = _NAME.fullmatch(text)
        if not match:
            raise ValueError(
                "a way to decode looks like raster, k=2, k=1,d=24, k=1/predecessor, zipar=4, "
                "zipar-adaptive=4, exact, exact,lanes=32, jacobi, tolerance=1.5, sjd or mc-sjd, "
                f"got {text!r}"
            )
        given = match.groupdict()
        if given["k"]:
            return cls._diagonal(int(given["k"]), given["d"], given["row_start"])
        if given["zipar"]:
            window, adaptive = int(given["window"]), given["zipar"] == "zipar-adaptive"
            engine = AdaptiveWindow(window) if adaptive else False
            return cls(f"{given['zipar']}={window}", window, None, "spatial", engine)
        if given["kind"] or given["tolerance"]:
            lanes = int(given["lanes"]) if given["lanes"] else None
            return cls._exact(given["kind"], float(given["tolerance"] or 1), lanes)
        return cls(text, lossless="tokens")

    @classmethod
    def _diagonal(cls, row_lag: int, frame_lag: str | None, row_start: str | None) -> "Way":
        start = cast(RowStart, "temporal" if row_start is None else row_start)
        check_row_start(start)
        name = f"k={row_lag}" + (f",d={int(frame_lag)}" if frame_lag else "")
        name += "" if start == "temporal" else f"/{start}"
        return cls(name, row_lag, int(frame_lag) if frame_lag else None, start)

    @classmethod
    def _exact(cls, kind: str | None, tolerance: float, num_lanes: int | None) -> "Way":
        name = kind or f"tolerance={tolerance:g}"
        name += "" if num_lanes is None else f",lanes={num_lanes}"
        if kind in ("exact", "jacobi"):
            options = ExactOptions(num_lanes, draft_lag=0 if kind == "jacobi" else None)
            return cls(name, exact=options, lossless="tokens")
        num_lanes = LANES if num_lanes is None else num_lanes
        if kind is None:
            lossless = "tokens" if tolerance == 1 else "no"
            return cls(name, exact=ExactOptions(num_lanes, tolerance=tolerance), lossless=lossless)
        options = ExactOptions(num_lanes, draft_lag=0, rule=cast(Rule, kind))
        return cls(name, exact=options, lossless="distribution")

    @property
    def settings(self) -> dict[str, Any]:
        """What `VideoGenerator.generate` takes of it."""
        lags: dict[str, Any] = {"row_lag": self.row_lag, "frame_lag": self.frame_lag}
        lags = {"raster": True} if self.row_lag is None else lags
        return {**lags, "row_start": self.row_start, "exact": self.exact}

    def schedule(self, grid: TokenGrid) -> DiagonalSchedule:
        """Return its schedule; of that of another engine only the grid matters.

        Raises:
            ValueError: lags or a window that do not fit the grid.
        """
        if self.row_lag is None:
            return DiagonalSchedule.raster(grid)
        if self.frame_lag is None:
            return DiagonalSchedule.spatial(grid, self.row_lag)
        return DiagonalSchedule(grid, self.row_lag, self.frame_lag)

    def check(self, temperature: float, runner: RunnerName = "eager") -> None:
        """Raise ValueError where it cannot decode so, which its engine would say later."""
        speculates = self.lossless == "distribution"
        if speculates and temperature == 0:
            raise ValueError(
                f"{self.name} needs a temperature above 0: greedy decoding draws nothing"
            )
        if (speculates or isinstance(self.exact, AdaptiveWindow)) and runner != "eager":
            raise ValueError(f"{self.name} needs backend eager or native, got {runner}")


def parse_ways(texts: Iterable[str], temperature: float) -> list[Way]:
    """Read names, of which a text may hold several with spaces between; each way once, in order.

    Raises:
        ValueError: a name that is none, or a way that has no meaning at this temperature.
    """
    ways = [Way.parse(word) for text in texts for word in text.split()]
    for way in ways:
        way.check(temperature)
    return list({way.name: way for way in ways}.values())
