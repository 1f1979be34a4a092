"""Where a video may start: the prompt and the scenes beside a model, or the clips of a folder."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from diagd.data.actions import read_actions
from diagd.data.video import IMAGE_SUFFIXES, read_video, resize
from diagd.pipeline.generator import VideoGenerator

CLIP_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov")


@dataclass(frozen=True, eq=False)
class StartScene:
    """Frames to go on from.

    Attributes:
        frames: (m, H_px, W_px, 3) uint8 RGB, of the model's size.
        actions: the m - 1 between them.
        fps: frames a second of the clip; of a picture those of the world.
    """

    name: str
    frames: Tensor
    actions: tuple[str, ...]
    fps: Fraction


def model_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[StartScene]:
    """Read a model folder's prompt.mp4, then all clips and images of its folder `scenes`.

    A clip of several frames needs its actions beside it (.jsonl).

    Raises:
        FileNotFoundError, ValueError: a file that cannot be used (named).
    """
    prompt = folder / "prompt.mp4"
    first = [read_scene(prompt, world, context_frames)] if prompt.is_file() else []
    return first + folder_scenes(folder / "scenes", world, context_frames)


def folder_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[StartScene]:
    """Read every clip and image of a folder, by name; an absent folder holds none."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    wanted = (*CLIP_SUFFIXES, *IMAGE_SUFFIXES)
    return [
        read_scene(path, world, context_frames)
        for path in files
        if path.suffix.lower() in wanted and not path.name.startswith(".")
    ]


def read_scene(path: Path, world: VideoGenerator, context_frames: int) -> StartScene:
    """Read the last context frames of a clip with their actions, or an image."""
    video = read_video(path)
    frames = resize(video.frames[-context_frames:], *world.frame_size_px).contiguous()
    actions: list[str] = []
    if len(frames) > 1:
        assert world.vocabulary is not None
        taken = read_actions(path.with_suffix(".jsonl"), world.vocabulary, len(video.frames))
        actions = taken[len(taken) - len(frames) + 1 :]
    name = path.stem.replace("-", " ").replace("_", " ")
    is_still = path.suffix.lower() in IMAGE_SUFFIXES
    fps = Fraction(world.defaults.fps).limit_denominator(1001) if is_still else video.fps
    return StartScene(name, frames, tuple(actions), fps)
