"""Show what a schedule costs: steps, lanes, and the order in which tokens are written.

diagd plan --grid 2x14x24 -k 1
diagd plan --grid 3x40x64 -k 1 -d 40     # frames overlap
"""

from dataclasses import dataclass
from typing import Any

from diagd.console import make_console
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.strategies.short_forms import strategy_of
from diagd.flags import FrameLag, RowLag


@dataclass(frozen=True)
class PlanOptions:
    """Count the steps of a schedule, without a model."""

    grid: str  # frames x rows x columns of tokens, such as 3x40x64
    strategy: str | None = None  # raster, k=2, k=1,d=14, k=1/predecessor or zipar=4; or in short:
    row_lag: RowLag = None  # columns a row runs ahead of the next; default 1
    frame_lag: FrameLag = None  # steps between frames; default: one starts when the last is whole
    spatial_only: bool = False  # the default, said aloud
    raster: bool = False  # next-token prediction

    def schedule(self) -> DiagonalSchedule:
        """Return the schedule that the flags name."""
        if self.spatial_only and self.frame_lag is not None:
            raise ValueError("spatial_only means that no frame_lag is given: frames do not overlap")
        strategy = strategy_of(self.strategy, self.row_lag, self.frame_lag, raster=self.raster)
        if not strategy.has_schedule:
            raise ValueError(f"{strategy} chooses its lanes on the way: it has no schedule to show")
        return strategy.schedule(TokenGrid.parse(self.grid))


def main(options: PlanOptions) -> dict[str, Any]:
    """Print the numbers, and for a small frame the step of every token."""
    schedule = options.schedule()
    grid = schedule.grid
    report = {
        "grid": options.grid,
        "row_lag": schedule.row_lag,
        "frame_lag": schedule.frame_lag,
        "num_tokens": grid.num_tokens,
        "num_steps": schedule.num_steps,
        "max_lanes": schedule.max_lanes,
        "speedup": round(schedule.speedup, 3),
    }
    console = make_console()
    for name, value in report.items():
        console.print(f"{name:<12}{value}")
    if grid.width <= 32:
        console.print("step at which each token of the first frame is written:")
        for i in range(grid.height):
            console.print(" ".join(f"{schedule.step_of(0, i, j):3d}" for j in range(grid.width)))
    return report
