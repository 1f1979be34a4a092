"""Show what a schedule costs: steps, lanes, and the order in which tokens are written."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from diagd.backends.devices import FrameLag, RowLag
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid


@dataclass(frozen=True)
class PlanOptions:
    """Count the steps of a schedule, without a model."""

    grid: str  # frames x rows x columns of tokens, such as 3x40x64
    row_lag: RowLag = 1  # columns a row runs ahead of the next
    frame_lag: FrameLag = None  # steps between frames; default row_lag * height
    spatial_only: bool = False  # a frame starts when the one before is whole
    raster: bool = False  # next-token prediction

    def schedule(self) -> DiagonalSchedule:
        """Return the schedule that the flags name."""
        grid = TokenGrid.parse(self.grid)
        if self.raster:
            return DiagonalSchedule.raster(grid)
        if self.spatial_only:
            return DiagonalSchedule.spatial(grid, self.row_lag)
        return DiagonalSchedule(grid, self.row_lag, self.frame_lag)


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
    table = Table(show_header=False, title="schedule")
    for name, value in report.items():
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    if grid.width <= 32:
        console.print("step at which each token of the first frame is written:")
        for i in range(grid.height):
            console.print(" ".join(f"{schedule.step_of(0, i, j):3d}" for j in range(grid.width)))
    return report
