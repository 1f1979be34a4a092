"""Clips to evaluate on: folders of videos, videos with action files, recordings of a family.

A `ClipFile` is only a reference (small, picklable); `read` decodes what is asked for and no more.
"""

import itertools
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, read_actions
from diagd.data.video import fit, frame_numbers, read_video, video_length
from diagd.families import table
from diagd.families.family import RecordingFormat
from diagd.files import naming, require_folder

VIDEO_SUFFIXES = (
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v"),
    *(".mpg", ".mpeg", ".ts", ".ogv", ".wmv", ".flv", ".y4m", ".gif"),
)


@dataclass(frozen=True)
class Clip:
    """Frames of a clip and what was done in it."""

    name: str
    frames: Tensor  # (T, H_px, W_px, 3) uint8 RGB
    fps: Fraction
    actions: list[str] | None  # each led to its frame; None where they were not asked for


@dataclass(frozen=True)
class ClipFile:
    """A clip on disk: a video, or a recording, which holds its actions."""

    name: str  # the path within its folder, without suffix
    path: Path
    codec: ActionCodec | None = None  # None: actions are not read

    @property
    def recording_format(self) -> RecordingFormat | None:
        return recording_formats().get(self.path.suffix.lower())

    def length(self) -> tuple[int, Fraction]:
        """Return the number of frames and the frame rate as stored; decodes nothing."""
        form = self.recording_format
        return form.length(self.path) if form else video_length(self.path)

    def check(
        self, num_frames: int | None = None, start: int = 0, fps: Fraction | float | None = None
    ) -> int:
        """Return how many frames `read` gives without a limit, or raise ValueError if too few."""
        stored, rate = self.length()
        with naming(self.path):
            numbers = frame_numbers(rate, fps, start)
            if self.codec is not None and fps is not None and abs(fps / rate - 1) > 0.01:
                raise ValueError(
                    f"actions are one a frame at {float(rate):g} fps and cannot be read at {fps}"
                )
        available = sum(1 for _ in itertools.takewhile(lambda number: number < stored, numbers))
        if available < (wanted := num_frames or 1):
            at_rate = "" if fps is None else f" at {float(fps):g} fps"
            raise ValueError(
                f"{self.path}: expected at least {wanted} frames from frame {start} on{at_rate}, "
                f"got {available} (the clip has {stored})"
            )
        return available

    def read(
        self,
        num_frames: int | None = None,
        start: int = 0,
        fps: Fraction | float | None = None,
        size_px: tuple[int, int] | None = None,
    ) -> Clip:
        """Decode frames, and the actions that led to them.

        Args:
            num_frames: how many, exactly; None for all that there are.
            start: frames left out at the head, counted at the rate of `fps`.
            fps: read a video without actions at a lower frame rate (see `video.frame_numbers`).
            size_px: (height_px, width_px) to fit frames to (see `video.resize`).
        """
        available = self.check(num_frames, start, fps)
        count = available if num_frames is None else num_frames
        _, rate = self.length()
        if (actions := self.actions()) is not None:
            fps = None  # the stored rate, as `check` has seen
        if form := self.recording_format:
            numbers = itertools.islice(frame_numbers(rate, fps, start), count)
            frames = torch.stack([fit(frame, size_px) for frame in form.frames(self.path, numbers)])
            rate = rate if fps is None else Fraction(fps)
        else:
            video = read_video(self.path, count, start=start, fps=fps, size_px=size_px)
            frames, rate = video.frames, video.fps
        if (found := len(frames)) != count:
            raise ValueError(f"{self.path} is truncated: expected {count} frames, decoded {found}")
        return Clip(self.name, frames, rate, actions and actions[start : start + count])

    def actions(self) -> list[str] | None:
        """Read the action that led to each stored frame; None without a codec."""
        if self.codec is None:
            return None
        stored, _ = self.length()
        if (form := self.recording_format) is None:
            return read_actions(self.path.with_suffix(".jsonl"), self.codec, stored)
        actions = form.actions(self.path)
        with naming(self.path):
            if len(actions) != stored:
                raise ValueError(f"expected {stored} actions (one a frame), got {len(actions)}")
            for action in dict.fromkeys(actions):
                self.codec.tokens_of(action)
        return actions


def recording_formats() -> dict[str, RecordingFormat]:
    """Return the families' formats of recordings by suffix, in lower case."""
    return {one.recordings.suffix: one.recordings for one in table.FAMILIES if one.recordings}


def find_clips(folder: Path, codec: ActionCodec | None = None) -> dict[str, ClipFile]:
    """List the clips below a folder by name: recordings if there is any, else videos."""
    inside = require_folder(folder, "folder of clips").rglob("*")
    found = sorted(path for path in inside if path.is_file() and path.name[0] != ".")
    recordings = [path for path in found if path.suffix.lower() in recording_formats()]
    paths = recordings or [path for path in found if path.suffix.lower() in VIDEO_SUFFIXES]
    if not paths:
        known = ", ".join((*VIDEO_SUFFIXES, *recording_formats()))
        raise FileNotFoundError(f"no clips ({known}) in {folder}")
    clips: dict[str, ClipFile] = {}
    for path in paths:
        if (name := path.relative_to(folder).with_suffix("").as_posix()) in clips:
            raise ValueError(f"two clips have one name: {clips[name].path} and {path}")
        clips[name] = ClipFile(name, path, codec)
    return clips
