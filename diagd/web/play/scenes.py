"""Where a session may start: the prompt and the scenes beside a model, and those of a folder."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene, folder_scenes, model_scenes
from diagd.web.play.encoding import to_jpeg
from diagd.web.play.session import SessionStart


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
    """Return the scenes of a model's folder, with a picture of each.

    Raises:
        FileNotFoundError, ValueError: a file that cannot be used (named).
    """
    return [_with_picture(scene) for scene in model_scenes(folder, world, context_frames)]


def read_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[Scene]:
    """Return the clips and images of a folder, by name; an absent folder holds none."""
    return [_with_picture(scene) for scene in folder_scenes(folder, world, context_frames)]


def _with_picture(scene: StartScene) -> Scene:
    start = SessionStart(scene.frames, scene.actions, 0)
    return Scene(scene.name, start, to_jpeg(scene.frames[-1]), scene.fps)
