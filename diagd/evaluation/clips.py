"""Clips to evaluate on: a folder of videos, each with its actions beside it where there are any.

The seam to the datasets: everything else asks these two functions for clips.
"""

import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from diagd.data.actions import ActionCodec, read_actions
from diagd.data.video import read_video, resize


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
    fps: Fraction
    actions: list[str] | None


def choose_clips(folder: Path, num_clips: int, seed: int) -> list[str]:
    """Draw clips of a folder at random; more clips of one seed contain the fewer ones.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: fewer clips in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of clips not found: {folder}")
    names = sorted(path.stem for path in folder.glob("*.mp4"))
    if len(names) < num_clips:
        raise ValueError(f"expected a number of clips from 1 to {len(names)}, got {num_clips}")
    random.Random(seed).shuffle(names)
    return sorted(names[:num_clips])


def read_clip(
    folder: Path,
    name: str,
    codec: ActionCodec | None,
    start: int,
    num_frames: int,
    fps: float | None,
    size_px: tuple[int, int],
) -> Clip:
    """Read `num_frames` frames from frame `start` on, with the actions that led to them.

    Args:
        fps: frame rate that the clip must have; None takes any.
        size_px: (height_px, width_px) to crop and scale to.

    Raises:
        FileNotFoundError: no video, or no action file beside it for a model with actions.
        ValueError: a clip that is too short, damaged, of another frame rate, or has actions the
            model does not know.
    """
    path = folder / f"{name}.mp4"
    video = read_video(path)
    if len(video.frames) < start + num_frames:
        raise ValueError(
            f"{path}: expected at least {num_frames} frames from frame {start} on, "
            f"got {len(video.frames) - start}"
        )
    if fps is not None and abs(float(video.fps) / fps - 1) > 0.01:
        raise ValueError(f"{path} has {float(video.fps):g} fps, expected {fps:g}")
    actions = None
    if codec is not None:
        actions = read_actions(path.with_suffix(".jsonl"), codec, len(video.frames))
        actions = actions[start : start + num_frames]
    frames = resize(video.frames[start : start + num_frames], *size_px)
    return Clip(name, frames, video.fps, actions)
