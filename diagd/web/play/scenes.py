"""Where a session may start: the prompt and the scenes beside a model, and those of a folder."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from diagd.data.actions import read_actions
from diagd.data.video import IMAGE_SUFFIXES, read_video, resize
from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.encoding import to_jpeg
from diagd.web.play.session import SessionStart

CLIP_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov")


@dataclass(frozen=True, eq=False)
class Scene:
    """A start (of seed 0) with a name and a picture of where one stands, as JPEG."""

    name: str
    start: SessionStart
    picture: bytes
    fps: Fraction


def start_scenes(
    model: Path, folder: Path | None, world: VideoGenerator, context_frames: int
) -> list[Scene]:
    """Return the scenes of a folder, if one is given, then those of the model's folder.

    Raises:
        FileNotFoundError, ValueError: a file that cannot be used (named), or no scene at all.
    """
    scenes = []
    if folder is not None:
        scenes = read_scenes(folder, world, context_frames)
        if not scenes:
            raise ValueError(f"no clip or image in {folder}")
    scenes += find_scenes(model, world, context_frames)
    if not scenes:
        raise ValueError(f"nowhere to start: {model} has no prompt.mp4, name a folder by --scenes")
    return scenes


def find_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[Scene]:
    """Read a model folder's prompt.mp4, then all clips and images of its folder `scenes`.

    A clip of several frames needs its actions beside it (.jsonl).

    Raises:
        FileNotFoundError, ValueError: a file that cannot be used (named).
    """
    prompt = folder / "prompt.mp4"
    scenes = []
    if prompt.is_file():
        scenes.append(read_scene(prompt, world, context_frames))
    return scenes + read_scenes(folder / "scenes", world, context_frames)


def read_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[Scene]:
    """Read every clip and image of a folder, by name; an absent folder holds none."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    wanted = (*CLIP_SUFFIXES, *IMAGE_SUFFIXES)
    return [
        read_scene(path, world, context_frames)
        for path in files
        if path.suffix.lower() in wanted and not path.name.startswith(".")
    ]


def read_scene(path: Path, world: VideoGenerator, context_frames: int) -> Scene:
    """Read the last context frames of a clip with their actions, or an image."""
    video = read_video(path)
    frames = resize(video.frames[-context_frames:], *world.frame_size_px)
    actions: list[str] = []
    if len(frames) > 1:
        assert world.vocabulary is not None
        taken = read_actions(path.with_suffix(".jsonl"), world.vocabulary, len(video.frames))
        actions = taken[len(taken) - len(frames) + 1 :]
    name = path.stem.replace("-", " ").replace("_", " ")
    start = SessionStart(frames.contiguous(), tuple(actions), 0)
    return Scene(name, start, to_jpeg(frames[-1]), video.fps)
