"""Start scenes: a world's own prompt, and clips and pictures of a folder."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from diagd.families.clip_files import prompt_suffixes, recording_formats
from diagd.files import list_files, note_left_out
from diagd.pipeline.generator import VideoGenerator


@dataclass(frozen=True, eq=False)
class StartScene:
    """Frames to continue."""

    name: str
    frames: Tensor  # (m, H_px, W_px, 3) uint8 RGB, of the model's size
    actions: tuple[str, ...]  # the m - 1 actions between
    fps: Fraction  # of the clip; for a picture that of the world


def model_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[StartScene]:
    """Read a model folder's prompt.mp4, named `opening`, then all of its folder `scenes`."""
    prompt, scenes = folder / "prompt.mp4", folder_scenes(folder / "scenes", world, context_frames)
    if prompt.is_file():
        scenes.insert(0, replace(read_scene(prompt, world, context_frames), name="opening"))
    return scenes


def folder_scenes(folder: Path, world: VideoGenerator, context_frames: int) -> list[StartScene]:
    """Read every clip (with its actions) and image of a folder, if it exists, by name."""
    if not folder.is_dir():
        return []
    found, others = list_files(folder, "folder of scenes", prompt_suffixes())
    note_left_out(folder, others)
    return [read_scene(path, world, context_frames) for path in found]


def read_scene(path: Path, world: VideoGenerator, context_frames: int) -> StartScene:
    """Read the frames of a scene; a video needs an action file beside it."""
    prompt = world.read_prompt(path, context_frames=context_frames)
    file, holds_actions = path.with_suffix(".jsonl"), path.suffix.lower() in recording_formats()
    if prompt.context_actions and not (holds_actions or file.is_file()):
        raise FileNotFoundError(f"action file not found: {file}")
    name = path.stem.replace("-", " ").replace("_", " ")
    fps = Fraction(prompt.fps).limit_denominator(1001)
    return StartScene(name, prompt.frames, tuple(prompt.context_actions or ()), fps)
