"""Show the cost of a schedule: steps, lanes, and the order of the tokens.

diagd plan --grid 2x14x24 -k 1
diagd plan --grid 3x40x64 -k 1 -d 40     # frames overlap
diagd plan --grid 3x40x64 --strategy zipar=4
diagd plan --grid 1x32x32 -k 1 --before 16x16 --lanes --json
"""

from typing import Any

from diagd.checks import read_size
from diagd.console import make_console
from diagd.decoding.schedule import FrameFormat, TokenGrid, make_plan
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.options import PlanOptions
from diagd.system import check_memory


def main(options: PlanOptions) -> dict[str, Any]:
    """Print the numbers and, for a small frame, the step of every token."""
    grid = TokenGrid.parse(options.grid)
    of_token = 1000 if options.lanes else 140  # at least
    check_memory(of_token * grid.num_tokens, f"the schedule of {options.grid} tokens")
    schedule = options.decoding(GenerationDefaults(), grid.height).schedule(grid)
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
    if not options.lanes:
        return report
    frame = FrameFormat(grid.height, grid.width)
    text, before = options.before, None
    if text is not None:
        before = FrameFormat(*read_size(text, "before", "16x16"))
    layout = frame.layout(grid.num_frames, before=before)
    return report | make_plan(schedule, layout, pad=False).as_data()
