"""Clips to evaluate on: a folder of videos, each with its actions beside it where there are any.

The seam to the datasets: everything else asks these two functions for clips.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diagd.data.actions import ActionCodec, read_actions
from diagd.data.video import read_video

VIDEO_SUFFIXES = (".mp4", ".mkv", ".avi", ".mov", ".webm")


@dataclass(frozen=True)
class Clip:
    """A recorded clip.

    Attributes:
        name: of the file, without suffix.
        frames: (T, H_px, W_px, 3) uint8 RGB.
        fps: frames per second.
        actions: T words, row t led from frame t - 1 to frame t; None for a model without actions.
    """

    name: str
    frames: Tensor
    fps: float
    actions: list[str] | None


def choose_clips(folder: Path, num_clips: int, seed: int) -> list[str]:
    """Draw clips of a folder at random; more clips of one seed contain the fewer ones.

    Raises:
        FileNotFoundError: no such folder, or fewer videos in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of clips not found: {folder}")
    names = sorted(path.name for path in folder.iterdir() if path.suffix in VIDEO_SUFFIXES)
    if len(names) < num_clips:
        raise FileNotFoundError(f"{folder} holds {len(names)} videos, expected {num_clips}")
    random.Random(seed).shuffle(names)
    return names[:num_clips]


def read_clip(
    folder: Path, name: str, codec: ActionCodec | None, start: int, num_frames: int
) -> Clip:
    """Read `num_frames` frames from frame `start` on, with the actions that led to them.

    Raises:
        FileNotFoundError: no video, or no action file beside it for a model with actions.
        ValueError: a clip that is too short, damaged, or has actions the model does not know.
    """
    path = folder / name
    video = read_video(path, start + num_frames)
    frames = video.frames[start:]
    if len(frames) < num_frames:
        raise ValueError(
            f"{path} has {len(video.frames)} frames, expected {start + num_frames} "
            f"({num_frames} from frame {start})"
        )
    actions = None
    if codec is not None:
        actions = read_actions(path.with_suffix(".jsonl"), codec)[start : start + num_frames]
        if len(actions) < num_frames:
            raise ValueError(f"{path.with_suffix('.jsonl')} ends before frame {start + num_frames}")
    return Clip(path.stem, frames, float(video.fps), actions)
