"""Choose a schedule by what it costs: steps against the likelihood of true videos.

Every candidate is judged by its teacher-forced gap (`diagd.decoding.likelihood`): how much
likelier, in nats a token, held-out clips are in raster order. Nothing is generated, so the whole
frontier takes as many readings of the clips as there are candidates.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from rich.progress import Progress
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.decoding.likelihood import schedule_nll
from diagd.decoding.plan import RowStart, check_row_start
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.families.checkpoints import load_model
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips, read_shards
from diagd.training.sequences import windows
from diagd.training.setup import check_fit, frames_held

Axis = Literal["frame", "row", "column"]


@dataclass(frozen=True)
class TuneOptions:
    """Measure what schedules cost a model on held-out clips; name the fastest within tolerance."""

    tokens: Path  # folder of held-out token shards, from diagd tokenize
    model: str = "doom"  # bundled model or checkpoint folder
    baseline: str | None = None  # model whose raster order is the yardstick; default: the model's
    tolerance: float = 0.02  # nats a token above raster that a schedule may cost
    row_lag: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-k"])] = ()  # default 1, 2, 4, 8
    overlap: bool = False  # actions are known ahead, so frames may overlap
    row_start: tuple[RowStart, ...] = get_args(RowStart)  # stand-ins to try
    by: tuple[Axis, ...] = ()  # show the gap by frame, row or column, too
    clips: int = 16  # held-out clips to judge by
    frames: int | None = None  # frames of a clip; default: as many as the model holds
    context_frames: int = 1  # of them, frames that are given
    seed: int = 0  # of the place of a window in its clip
    device: str = "cpu"
    out: Path | None = None  # folder for tune.json and plots

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more, got {self.tolerance}")
        for name in ("clips", "context_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.row_start:
            raise ValueError("row_start must name at least one policy")
        for row_start in self.row_start:
            check_row_start(row_start)


def tune(options: TuneOptions) -> dict[str, Any]:
    """Measure every candidate, and name the fastest within the tolerance.

    Returns:
        The document of tune.json: options, grid, a row for each candidate, raster first, and the
        choice, None where no candidate is within the tolerance.

    Raises:
        FileNotFoundError, ValueError: a model or clips that are missing or do not fit.
    """
    device = device_of(options.device)
    clips = read_shards(options.tokens)
    model = _load(options.model, clips, device)
    yardstick = _load(options.baseline, clips, device) if options.baseline else None
    held = frames_held(model.config)
    frames = min(held, clips.tokens.shape[1]) if options.frames is None else options.frames
    if not options.context_frames < frames <= held:
        raise ValueError(
            f"frames must be in [context_frames + 1={options.context_frames + 1}, {held}], "
            f"which the model holds, got {frames}"
        )
    grid = TokenGrid(frames - options.context_frames, *clips.tokens.shape[2:])
    candidates = list_candidates(options, grid)
    cut = [ids.split(1) for ids in windows(clips, options.clips, frames, options.seed)]
    single = list(zip(*cut, strict=True))
    nll = _measure(model, candidates, single, options.context_frames)
    raster = nll[0]
    if yardstick is not None:
        (raster,) = _measure(yardstick, candidates[:1], single, options.context_frames)
    rows = [_row(*measured, raster) for measured in zip(candidates, nll, strict=True)]
    for row in rows:
        row["frontier"] = not any(_beats(other, row) for other in rows)
    affordable = [row for row in rows if row["gap"] <= options.tolerance]
    choice = min(affordable, key=lambda row: (row["num_steps"], row["gap"]), default=None)
    return {
        "options": {
            **asdict(options),
            "tokens": str(options.tokens),
            "out": options.out and str(options.out),
        },
        "grid": [grid.num_frames, grid.height, grid.width],
        "torch": torch.__version__,
        "rows": rows,
        "choice": choice and {name: choice[name] for name in ("name", "row_start", "num_steps")},
    }


@dataclass(frozen=True)
class Candidate:
    """A strategy to judge; `row_start` is empty for raster, which has no stand-ins."""

    schedule: DiagonalSchedule
    row_start: RowStart | Literal[""] = ""

    @property
    def name(self) -> str:
        """Name the lags, the frame lag only where frames overlap."""
        schedule = self.schedule
        if not self.row_start:
            return "raster"
        overlap = schedule.frame_lag < schedule.steps_per_frame
        return f"k={schedule.row_lag}" + f" d={schedule.frame_lag}" * overlap


def list_candidates(options: TuneOptions, grid: TokenGrid) -> list[Candidate]:
    """List raster, then the schedules to try, each with each row start.

    Raises:
        ValueError: a row lag that the grid does not allow.
    """
    row_lags = options.row_lag or [lag for lag in (1, 2, 4, 8) if lag < grid.width]
    raster = DiagonalSchedule.raster(grid)
    found = [Candidate(raster)]
    for row_lag in row_lags:
        spatial = DiagonalSchedule.spatial(grid, row_lag)
        whole = row_lag * grid.height
        frame_lags = [spatial.frame_lag]
        if options.overlap:
            frame_lags += [lag for lag in (whole, whole // 2, whole // 4) if lag >= 1]
        schedules = [
            DiagonalSchedule(grid, row_lag, lag)
            for lag in dict.fromkeys(frame_lags)
            if lag <= spatial.frame_lag
        ]
        found += [
            Candidate(schedule, row_start)
            for schedule in schedules
            for row_start in options.row_start
            if schedule != raster
        ]
    return found


def _load(name: str, clips: TokenClips, device: torch.device) -> Transformer:
    model = load_model(name, device=device)
    check_fit(name, model.config, clips)
    return model


def _measure(
    model: Transformer, candidates: list[Candidate], clips: list[tuple[Tensor, Tensor]], given: int
) -> Tensor:
    """Return (candidates, clips, T, height, width) float64 nats; clips one by one."""
    costs: list[Tensor] = []
    with Progress() as progress:
        task = progress.add_task("judging", total=len(candidates) * len(clips))
        for candidate in candidates:
            schedule, row_start = candidate.schedule, candidate.row_start or "temporal"
            for clip in clips:
                costs.append(schedule_nll(model, *clip, schedule, row_start, given))
                progress.advance(task)
    return torch.cat(costs).unflatten(0, (len(candidates), len(clips))).double().cpu()


def _row(candidate: Candidate, cost: Tensor, raster: Tensor) -> dict[str, Any]:
    """Report a candidate from its cost and raster's, both (clips, T, H, W)."""
    gap = cost - raster
    by_clip = gap.mean((1, 2, 3))
    error = by_clip.std().item() / math.sqrt(len(gap)) if len(gap) > 1 else 0.0
    schedule = candidate.schedule
    return {
        "name": candidate.name,
        "row_lag": schedule.row_lag,
        "frame_lag": schedule.frame_lag,
        "row_start": candidate.row_start,
        "num_steps": schedule.num_steps,
        "speedup": schedule.speedup,
        "nll": cost.mean().item(),
        "gap": gap.mean().item(),
        "gap_error": error,  # standard error over clips
        "gap_by_frame": gap.mean((0, 2, 3)).tolist(),
        "gap_by_row": gap.mean((0, 1, 3)).tolist(),
        "gap_by_column": gap.mean((0, 1, 2)).tolist(),
    }


def _beats(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether a row is as fast and cheaper, or as cheap and faster."""
    return row["num_steps"] <= other["num_steps"] and (
        (row["gap"], row["num_steps"]) < (other["gap"], other["num_steps"])
    )
