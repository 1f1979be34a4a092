"""The main job: dream a video with a world model and say how fast it was.

diagd generate                                       # the bundled model, its prompt, dream.mp4
diagd generate --actions "forward*8,left*8" --compare
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from diagd.backends import Backend
from diagd.data.actions import parse_actions, read_actions
from diagd.data.video import Video, contact_sheet, read_video, resize, write_image, write_video
from diagd.decoding.exact import ExactOptions
from diagd.decoding.plan import RowStart
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.flags import DTypeName, FrameLag, RowLag, device_of, dtype_of
from diagd.models.checkpoints import model_folder
from diagd.pipeline import DEFAULT_SAMPLING, GeneratedVideo, VideoGenerator

DEFAULT_FPS = 8.75
RASTER_FRAMES = 2  # dreamt in raster order for the table's first line


@dataclass(frozen=True)
class GenerateOptions:
    """Dream a video from a prompt clip and actions, and write it as mp4 with a contact sheet."""

    model: str = "doom"  # the bundled model, or a checkpoint folder
    prompt: Path | None = (
        None  # video (its last frames are continued) or image; default: the bundled clip
    )
    context_frames: int = 4  # frames of the prompt that the model sees
    actions: str | None = (
        None  # such as forward*8,left*4, or a jsonl file; default: the bundled walk
    )
    frames: int = 16  # frames to dream
    row_lag: RowLag = 1  # the paper's k: columns a row runs ahead of the next one
    frame_lag: FrameLag = (
        None  # the paper's d: steps between frames; default: a frame starts when the last is whole
    )
    row_start: RowStart = "temporal"  # what stands in for a predecessor that is not known yet
    raster: bool = False  # next-token prediction, one token a step
    exact: bool = False  # what raster would write, token for token, in fewer passes
    tolerance: float = 1.0  # accept guesses up to so many times too unlikely for --exact; 1: none
    compare: bool = False  # run raster as well; the video shows both side by side (raster left)
    temperature: float = DEFAULT_SAMPLING.temperature  # 0 is greedy
    top_k: int | None = DEFAULT_SAMPLING.top_k  # keep the k likeliest tokens
    top_p: float | None = DEFAULT_SAMPLING.top_p  # keep the likeliest tokens up to this mass
    seed: int = 0  # repeats a dream exactly
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeName = "float32"  # of the weights
    backend: Backend = "auto"  # what runs the steps; auto is native on the CPU, cuda-graph on CUDA
    output: Path = Path("dream.mp4")  # the contact sheet goes beside it as .png

    def __post_init__(self) -> None:
        for name in ("frames", "context_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.output.suffix != ".mp4":
            raise ValueError(f"output must end in .mp4, got {self.output}")
        if self.raster and (self.compare or self.exact):
            name = "compare" if self.compare else "exact"
            raise ValueError(f"{name} already runs raster; leave --raster out")
        if self.tolerance != 1 and not self.exact:
            raise ValueError("tolerance needs --exact")
        ExactOptions(tolerance=self.tolerance)  # checks it

    def sampling(self) -> SamplingOptions:
        """Return how tokens are drawn; greedy needs no truncation."""
        if self.temperature == 0:
            return SamplingOptions()
        return SamplingOptions(self.temperature, self.top_k, self.top_p)


def main(options: GenerateOptions) -> dict[str, Any]:
    """Dream, write, report."""
    console = Console()
    sampling = options.sampling()
    sheet = options.output.with_suffix(".png")
    check_writable(options.output)
    check_writable(sheet)
    device, dtype = device_of(options.device), dtype_of(options.dtype)
    world = VideoGenerator.from_pretrained(
        options.model, device, dtype, options.backend, options.dtype == "int8"
    )
    grid = TokenGrid(options.frames, world.height, world.width)
    DiagonalSchedule(grid, options.row_lag, options.frame_lag)  # before raster has run in vain
    context, context_actions, fps = _prompt(options, world, console)
    actions = _actions(options, world)

    def dream(num_frames: int, raster: bool) -> GeneratedVideo:
        return world.generate(
            context,
            None if actions is None else actions[:num_frames],
            num_frames,
            options.row_lag,
            options.frame_lag,
            context_actions=context_actions,
            raster=raster,
            row_start=options.row_start,
            sampling=sampling,
            seed=options.seed,
            exact=options.exact and not raster and ExactOptions(tolerance=options.tolerance),
        )

    num_timed = options.frames if options.compare else min(options.frames, RASTER_FRAMES)
    wanted = {} if options.raster else {"raster": (num_timed, True)}
    parallel = "exact" if options.exact else f"row_lag {options.row_lag}"
    wanted["raster" if options.raster else parallel] = (options.frames, options.raster)
    videos: dict[str, GeneratedVideo] = {}
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for name, (num_frames, raster) in wanted.items():
            task = progress.add_task(f"dreaming {num_frames} frames, {name}")
            with one_note_instead():
                videos[name] = dream(num_frames, raster)
            progress.remove_task(task)
    whole = [video for video in videos.values() if len(video.frames) == options.frames]
    _write(options.output, sheet, context, whole[-1 - options.compare :], fps)
    report = _report(videos)
    _print(console, report, options, sheet)
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}


@contextlib.contextmanager
def one_note_instead() -> Iterator[None]:
    """Hold back the engine's warning of every full context; the table is followed by one."""
    logger = logging.getLogger("diagd.engine")
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)


def check_writable(output: Path) -> None:
    """Raise now rather than after the work if a file cannot be written there."""
    folder = output.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"output folder does not exist: {folder}")
    if output.is_dir():
        raise ValueError(f"output is a folder, expected a file name: {output}")
    probe = folder / f".{output.name}.probe"
    try:
        probe.touch()
    except OSError as error:
        raise ValueError(f"output cannot be written: {output} ({error.strerror})") from None
    probe.unlink()


def _prompt(
    options: GenerateOptions, world: VideoGenerator, console: Console
) -> tuple[Tensor, list[str] | None, float]:
    """Return the context frames, the actions between them, and the frame rate."""
    path = options.prompt or model_folder(options.model) / "prompt.mp4"
    video = read_video(path)
    height_px, width_px = world.frame_size_px
    if video.frames.shape[1:3] != (height_px, width_px):
        given = "x".join(map(str, video.frames.shape[1:3]))
        console.print(
            f"prompt is {given} pixels: cropped to the centre and scaled to {height_px}x{width_px}"
        )
        video = Video(resize(video.frames, height_px, width_px), video.fps)
    count = min(options.context_frames, len(video.frames))
    if 1 < count < options.context_frames:
        console.print(f"prompt has {count} frames: the model sees no more than these")
    fps = float(video.fps) if len(video.frames) > 1 else DEFAULT_FPS
    actions = None
    if world.vocabulary is not None:
        actions = []
        if count > 1:
            taken = read_actions(path.with_suffix(".jsonl"), world.vocabulary, len(video.frames))
            actions = taken[len(taken) - count + 1 :]
    return video.frames[-count:], actions, fps


def _actions(options: GenerateOptions, world: VideoGenerator) -> list[str] | None:
    """Return one action a frame; the bundled walk is cut or repeated to length."""
    if world.vocabulary is None:
        if options.actions is not None:
            raise ValueError("this model takes no actions")
        return None
    if options.actions is None:
        walk = read_actions(model_folder(options.model) / "walk.jsonl", world.vocabulary)
        actions = [walk[frame % len(walk)] for frame in range(options.frames if walk else 0)]
    elif options.actions.endswith(".jsonl"):
        actions = read_actions(options.actions, world.vocabulary)
    else:
        actions = parse_actions(options.actions, world.vocabulary)
    if len(actions) != options.frames:
        raise ValueError(f"expected {options.frames} actions (one a frame), got {len(actions)}")
    return actions


def _write(
    output: Path, sheet: Path, context: Tensor, videos: list[GeneratedVideo], fps: float
) -> None:
    """Write the context followed by the dream; several dreams stand side by side."""
    whole = [torch.cat([context, video.frames]) for video in videos]
    write_video(output, torch.cat(whole, dim=2), fps)
    write_image(sheet, torch.cat([contact_sheet(frames, columns=5) for frames in whole], dim=0))


def _report(videos: dict[str, GeneratedVideo]) -> list[dict[str, Any]]:
    report = [{"schedule": name, **asdict(video.stats)} for name, video in videos.items()]
    for row, video in zip(report, videos.values(), strict=True):
        row["num_frames"] = len(video.frames)
        row["speedup"] = row["frames_per_second"] / report[0]["frames_per_second"]
    tokens = [video.tokens for video in videos.values()]
    if len(tokens) == 2:
        both = min(map(len, tokens))
        equal = (tokens[0][:both] == tokens[1][:both]).float().mean().item()
        report[1]["tokens_equal_to_raster"] = equal
    return report


def _print(
    console: Console, report: list[dict[str, Any]], options: GenerateOptions, sheet: Path
) -> None:
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    title = f"{options.model} on {options.device}{threads}, {options.dtype}"
    table = Table(title=title, box=SIMPLE)
    for column in ("", "frames", "steps", "seconds", "tokens/s", "frames/s", "speedup"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report:
        table.add_row(
            row["schedule"],
            str(row["num_frames"]),
            str(row["num_steps"]),
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['frames_per_second']:.2f}",
            f"{row['speedup']:.1f}x" if len(report) > 1 else "-",
        )
    console.print(table)
    if dropped := report[-1]["num_dropped_frames"]:
        console.print(f"the model's context was full: its {dropped} oldest frames were forgotten")
    console.print(f"wrote {options.output} and {sheet}")
