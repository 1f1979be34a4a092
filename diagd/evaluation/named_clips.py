"""Clips by name: which ones of a folder to evaluate on, and each fitted to a model.

What lies in the folder is the business of `diagd.families.clip_files`.
"""

from collections.abc import Collection
from pathlib import Path

from diagd.data.actions import ActionCodec
from diagd.families.clip_files import Clip, find_clips, sample_clips
from diagd.provenance import clip_fingerprint


def choose_clips(folder: Path, num_clips: int, seed: int) -> list[str]:
    """Draw clips of a folder at random; more clips of one seed contain the fewer ones.

    Raises:
        FileNotFoundError: no such folder, or no clips in it.
        ValueError: fewer clips in it.
    """
    return [clip.name for clip in sample_clips(find_clips(folder), num_clips, seed)]


def fingerprint_clips(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return hex digits that stand for what is in each of these clips of a folder."""
    return {
        clip.name: clip_fingerprint(clip.path) for clip in find_clips(folder) if clip.name in names
    }


def check_clips(
    folder: Path,
    names: Collection[str],
    codec: ActionCodec | None,
    start: int,
    num_frames: int,
    fps: float | None,
) -> None:
    """See that `read_clip` can read these clips, from their heads and their action files.

    Raises:
        FileNotFoundError, ValueError: a clip that cannot be read so (named).
    """
    for clip in find_clips(folder, codec=codec):
        if clip.name in names:
            clip.check(num_frames, start, fps)
            clip.actions()


def read_clip(
    folder: Path,
    name: str,
    codec: ActionCodec | None,
    start: int,
    num_frames: int,
    fps: float | None,
    size_px: tuple[int, int] | None = None,
    least: int | None = None,
) -> Clip:
    """Read `num_frames` frames from frame `start` on, with the actions that led to them.

    Args:
        codec: of the model's actions; None leaves actions unread.
        fps: frame rate to read at (see `ClipFile.read`).
        size_px: (height_px, width_px) to crop and scale to; None leaves frames as they are.
        least: frames that are enough where the clip has no more; None: `num_frames`.

    Raises:
        FileNotFoundError, ValueError: a clip that cannot be read so (named).
    """
    files = {clip.name: clip for clip in find_clips(folder, codec=codec)}
    if least is not None:
        num_frames = min(num_frames, files[name].check(least, start, fps))
    return files[name].read(num_frames, start, fps, size_px)


def clip_after(folder: Path, name: str) -> str:
    """Return the clip of a folder that comes after this one by name, the first after the last.

    Raises:
        FileNotFoundError: no such folder, or no clips in it.
        ValueError: there is no other clip.
    """
    names = [clip.name for clip in find_clips(folder)]
    if len(names) < 2:
        raise ValueError(f"{folder} holds one clip only: another one is needed to compare with")
    return names[(names.index(name) + 1) % len(names)]
