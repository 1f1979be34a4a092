"""What a dream starts from: frames of a prompt, the actions between them, and those to come.

A prompt is a video, a still image, or one of WHAM's npz clips. A video's actions are in the jsonl
file beside it; an npz clip has its own.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from torch import Tensor

from diagd.data.actions import parse_actions, read_actions
from diagd.data.clips import ClipFile
from diagd.data.video import IMAGE_SUFFIXES
from diagd.models.checkpoints import model_path
from diagd.pipeline import VideoGenerator


@dataclass(frozen=True)
class Start:
    """The start of a dream.

    Attributes:
        frames: (m, H_px, W_px, 3) uint8, the context, of the model's size.
        context_actions: the m - 1 actions between them; None for a model without actions.
        coming_actions: what the clip holds of the actions after them, newest frame first.
        fps: frames a second to write.
    """

    frames: Tensor
    context_actions: list[str] | None
    coming_actions: list[str]
    fps: float


def read_start(
    path: Path | None,
    model: str,
    world: VideoGenerator,
    context_frames: int | None,
    num_frames: int,
    console: Console,
) -> Start:
    """Read the prompt, or the bundled one.

    The last frames of a video are continued. An npz clip is a whole recording: its first frames are
    the context, and its own actions are what comes next.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or too short for the model.
    """
    path = path or model_path(model) / "prompt.mp4"
    if not path.is_file():
        raise FileNotFoundError(f"video not found: {path}")
    wanted = context_frames or world.habits.context_frames
    step = world.tokenizer.temporal_compression
    if (wanted - 1) % step:
        raise ValueError(
            f"context_frames must be 1 or {step} n + 1: the tokenizer joins {step} frames, "
            f"got {wanted}"
        )
    is_npz, is_image = path.suffix == ".npz", path.suffix.lower() in IMAGE_SUFFIXES
    codec = None if is_image else world.vocabulary
    bare = ClipFile(path.stem, path)
    stored, rate = (1, Fraction(1)) if is_image else bare.length()
    count = min(wanted, stored)
    count -= (count - 1) % step
    if not is_image and count < wanted:
        console.print(f"prompt has {stored} frames: the model sees {count} of {wanted}")
    start = 0 if is_npz or is_image else stored - count
    clip = ClipFile(path.stem, path, codec if count > 1 or is_npz else None, _rows(path))
    size_px = world.frame_size_px
    read = clip.read(count, start, size_px=size_px)
    given = read_size(path, bare)
    if given != size_px:
        console.print(
            f"prompt is {given[0]}x{given[1]} pixels: cropped to the centre and scaled to "
            f"{size_px[0]}x{size_px[1]}"
        )
    context_actions = None
    if world.vocabulary is not None:
        context_actions = read.actions[1:] if read.actions else []
    coming: list[str] = []
    if is_npz and codec is not None and stored > count:
        coming = clip.read(min(num_frames, stored - count), count, size_px=size_px).actions or []
    fps = float(rate) if not is_image and stored > 1 else world.habits.fps
    return Start(read.frames, context_actions, coming, fps)
