"""Where a session may start: the prompt and the scenes beside a model, and those of a folder."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import folder_scenes, model_scenes
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
    scenes = folder_scenes(folder, world, context_frames) if folder is not None else []
    if folder is not None and not scenes:
        raise ValueError(f"no clip or image in {folder}")
    scenes += model_scenes(model, world, context_frames)
    if not scenes:
        raise ValueError(f"nowhere to start: {model} has no prompt.mp4, name a folder by --scenes")
    return [
        Scene(
            scene.name,
            SessionStart(scene.frames, scene.actions, 0),
            to_jpeg(scene.frames[-1]),
            scene.fps,
        )
        for scene in scenes
    ]
