"""Clips to evaluate on: folders of videos, videos with action files, recordings of a family.

for clip_file in find_clips("heldout", codec=world.vocabulary):
    clip = clip_file.read(num_frames=16, size_px=world.frame_size_px)

A `ClipFile` is only a reference (small, picklable); `read` decodes what is asked for and no more.
A recording holds frames and actions in one file, as WHAM's npz files do.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, idle_action, read_actions
from diagd.data.video import fit, frame_numbers, read_video, video_length
from diagd.families import table
from diagd.families.family import ActionRows, RecordingFormat

VIDEO_SUFFIXES = (
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v"),
    *(".mpg", ".mpeg", ".ts", ".ogv", ".wmv", ".flv", ".y4m", ".gif"),
)

ClipKind = Literal["auto", "video", "actions", "recordings"]


@dataclass(frozen=True)
class Clip:
    """Frames of a clip and what was done in it.

    Attributes:
        name: of the clip within its folder.
        frames: (T, H_px, W_px, 3) uint8 RGB.
        fps: frames per second of `frames`.
        actions: T actions, each the one that led to its frame; None where they were not asked for.
    """

    name: str
    frames: Tensor
    fps: Fraction
    actions: list[str] | None


@dataclass(frozen=True)
class ClipFile:
    """A clip on disk.

    Attributes:
        name: the path within its folder, without suffix.
        path: a video or a recording.
        codec: reads the actions, from the recording or from the jsonl file beside the video. None:
            actions are not read.
        rows: what row t of the stored actions did: lead to frame t (`arriving`), or lead away from
            it, to frame t + 1 (`leaving`). None: as recordings of this format have it, and
            `arriving` in jsonl files.
    """

    name: str
    path: Path
    codec: ActionCodec | None = None
    rows: ActionRows | None = None

    @property
    def recording_format(self) -> RecordingFormat | None:
        """How the file holds frames and actions; None for a video."""
        return recording_formats().get(self.path.suffix.lower())

    def length(self) -> tuple[int, Fraction]:
        """Return the number of frames and the frame rate as stored; decodes nothing.

        Raises:
            FileNotFoundError, ValueError: the file is missing or damaged.
        """
        form = self.recording_format
        return form.length(self.path) if form else video_length(self.path)

    def check(
        self, num_frames: int | None = None, start: int = 0, fps: Fraction | float | None = None
    ) -> int:
        """Return how many frames `read` would give without a limit, and see that it can.

        Raises:
            FileNotFoundError: the clip or its action file is missing.
            ValueError: the clip is too short or damaged, or resampled although it has actions.
        """
        stored, rate = self.length()
        try:
            numbers = frame_numbers(rate, fps, start)
            if self.codec is not None and fps is not None and abs(fps / rate - 1) > 0.01:
                raise ValueError(
                    f"actions are one a frame at {float(rate):g} fps and cannot be read at {fps}"
                )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        available = sum(1 for _ in itertools.takewhile(lambda number: number < stored, numbers))
        if available < (num_frames or 1):
            at_rate = "" if fps is None else f" at {float(fps):g} fps"
            raise ValueError(
                f"{self.path}: expected at least {num_frames or 1} frames from frame {start} "
                f"on{at_rate}, got {available} (the clip has {stored})"
            )
        if self.codec is not None and self.recording_format is None:
            _action_file(self.path)
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

        Raises:
            FileNotFoundError: the clip or its action file is missing.
            ValueError: the clip is too short or damaged, an action is none of the codec's, there
                is not one for each frame, or `fps` is given although there are actions.
        """
        if num_frames is not None and num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {num_frames}")
        available = self.check(num_frames, start, fps)
        count = available if num_frames is None else num_frames
        if self.codec is not None:
            fps = None  # the stored rate, as `check` has seen
        form = self.recording_format
        if form is not None:
            _, stored_rate = form.length(self.path)
            numbers = itertools.islice(frame_numbers(stored_rate, fps, start), count)
            frames = torch.stack([fit(frame, size_px) for frame in form.frames(self.path, numbers)])
            rate = stored_rate if fps is None else Fraction(fps)
        else:
            video = read_video(self.path, count, start=start, fps=fps, size_px=size_px)
            frames, rate = video.frames, video.fps
        if len(frames) != count:
            raise ValueError(
                f"{self.path} is truncated: expected {count} frames, decoded {len(frames)}"
            )
        actions = self.actions()
        return Clip(self.name, frames, rate, actions and actions[start : start + count])

    def actions(self) -> list[str] | None:
        """Read the action that led to each stored frame; None without a codec.

        Raises:
            FileNotFoundError, ValueError: the file is missing, an action is none of the codec's, or
                there is not one for each frame.
        """
        if self.codec is None:
            return None
        stored, _ = self.length()
        form = self.recording_format
        if form is not None:
            actions = form.actions(self.path)
            if len(actions) != stored:
                raise ValueError(
                    f"{self.path}: expected {stored} actions (one a frame), got {len(actions)}"
                )
            try:
                for action in dict.fromkeys(actions):
                    self.codec.tokens_of(action)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
        else:
            actions = read_actions(_action_file(self.path), self.codec, stored)
        rows = self.rows or (form.rows if form else "arriving")
        return actions if rows == "arriving" else [idle_action(self.codec), *actions[:-1]]


def recording_formats() -> dict[str, RecordingFormat]:
    """Return the formats of recordings that families bring, by suffix in lower case."""
    formats = (family.recordings for family in table.FAMILIES)
    return {form.suffix: form for form in formats if form is not None}


def find_clips(
    folder: str | Path,
    kind: ClipKind = "auto",
    codec: ActionCodec | None = None,
    rows: ActionRows | None = None,
) -> list[ClipFile]:
    """List the clips below a folder, sorted by name; opens none of them.

    Args:
        kind: `video`: without actions. `actions`: videos, each with a NAME.jsonl beside it.
            `recordings`: files of a family's own (actions only with a codec). `auto`: recordings
            if there is any; else actions if there is a codec; else video.
        codec: the actions of the model that is to see the clips.
        rows: whether row t of the actions led to frame t or away from it (see `ClipFile`).

    Raises:
        FileNotFoundError: no such folder, no clips in it, or a missing action file.
        ValueError: clips of one name, or kind `actions` without a codec.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of clips not found: {folder}")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    recordings = tuple(recording_formats())
    if kind == "auto":
        any_recording = any(path.suffix.lower() in recordings for path in found)
        kind = "recordings" if any_recording else "video" if codec is None else "actions"
    if kind == "actions" and codec is None:
        raise ValueError("clips with actions need a model that takes actions")
    suffixes = recordings if kind == "recordings" else VIDEO_SUFFIXES
    paths = [path for path in found if path.suffix.lower() in suffixes]
    if not paths:
        raise FileNotFoundError(f"no clips ({', '.join(suffixes)}) in {folder}")
    clips: dict[str, ClipFile] = {}
    for path in paths:
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in clips:
            raise ValueError(f"two clips have one name: {clips[name].path} and {path}")
        if kind == "actions":
            _action_file(path)
        clips[name] = ClipFile(name, path, None if kind == "video" else codec, rows)
    return list(clips.values())


def sample_clips(
    clips: Sequence[ClipFile], count: int | None = None, seed: int | None = None
) -> list[ClipFile]:
    """Take some clips: the first `count`, or with a seed a random choice, in the order of `clips`.

    A larger choice with the same seed contains the smaller one.

    Raises:
        ValueError: not so many clips.
    """
    if count is None:
        return list(clips)
    if not 1 <= count <= len(clips):
        raise ValueError(f"expected a number of clips from 1 to {len(clips)}, got {count}")
    places = list(range(len(clips)))
    if seed is not None:
        random.Random(seed).shuffle(places)
    return [clips[place] for place in sorted(places[:count])]


def _action_file(video: Path) -> Path:
    path = video.with_suffix(".jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"action file not found: {path} (kind video needs none)")
    return path
