"""Evaluation clips: folders of videos, videos with action files, recordings of a family.

A `ClipFile` is only a reference (small, picklable); `read` decodes only what is requested.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, read_actions
from diagd.data.frames import FILM_SUFFIXES, PICTURE_SUFFIXES, Times
from diagd.data.video import fit, open_video
from diagd.families import table
from diagd.families.family import RecordingFormat
from diagd.files import list_files, naming, note_left_out


@dataclass(frozen=True)
class Clip:
    """Frames of a clip and their actions."""

    name: str
    frames: Tensor  # (T, H_px, W_px, 3) uint8 RGB
    fps: Fraction
    actions: list[str] | None  # each led to its frame; None if not requested


@dataclass(frozen=True)
class ClipFile:
    """A clip on disk: a video, or a recording with its actions."""

    name: str  # path inside its folder, without suffix
    path: Path
    codec: ActionCodec | None = None  # None: actions are not read

    @property
    def recording_format(self) -> RecordingFormat | None:
        return recording_formats().get(self.path.suffix.lower())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Times, Callable[[list[int]], Iterable[Tensor]]]]:
        """Yield the times of frames, and a function that reads frames by number."""
        if form := self.recording_format:
            yield Times.constant(*form.length(self.path)), partial(form.frames, self.path)
        else:
            with open_video(self.path) as shown:
                yield shown.times, lambda numbers: map(torch.from_numpy, shown.frames(numbers))

    def times(self) -> Times:
        """Return when frames are shown; does not decode films."""
        with self._opened() as (times, _):
            return times

    def length(self) -> tuple[int, Fraction]:
        """Return the number of frames and the average rate; does not decode films."""
        times = self.times()
        return len(times.starts), times.rate

    def check(
        self, num_frames: int | None = None, start: int = 0, fps: Fraction | float | None = None
    ) -> int:
        """Return the number of frames that `read` gives without a limit; ValueError if too few."""
        return len(self._numbers(self.times(), num_frames, start, fps))

    def _numbers(
        self, times: Times, num_frames: int | None, start: int, fps: Fraction | float | None
    ) -> list[int]:
        rate = times.rate
        with naming(self.path):
            numbers = list(times.numbers(fps, start))
            if self.codec is not None and fps is not None:
                if abs(fps / rate - 1) > 0.01:
                    raise ValueError(
                        f"actions are given at {float(rate):g} fps and cannot be read at {fps}"
                    )
                numbers = list(times.numbers(None, start))
        if len(numbers) < (wanted := num_frames or 1):
            at_rate = "" if fps is None else f" at {float(fps):g} fps"
            raise ValueError(
                f"{self.path}: expected at least {wanted} frames from frame {start} on{at_rate}, "
                f"got {len(numbers)} (the clip has {len(times.starts)})"
            )
        return numbers

    def read(
        self,
        num_frames: int | None = None,
        start: int = 0,
        fps: Fraction | float | None = None,
        size_px: tuple[int, int] | None = None,
    ) -> Clip:
        """Decode frames, and the actions that led to them.

        Args:
            num_frames: exact number of frames; None for all.
            start: frames to skip, counted at the rate of `fps`.
            fps: lower frame rate for a video without actions (see `Times.numbers`).
            size_px: (height_px, width_px) to fit frames to (see `video.resize`).
        """
        with self._opened() as (times, frames_of):
            numbers = self._numbers(times, num_frames, start, fps)[:num_frames]
            actions = self._actions(len(times.starts))
            frames = [fit(frame, size_px) for frame in frames_of(numbers)]
        if (found := len(frames)) != (count := len(numbers)):
            raise ValueError(f"{self.path}: truncated, expected {count} frames, decoded {found}")
        rate = times.rate if fps is None or actions is not None else Fraction(fps)
        return Clip(
            self.name, torch.stack(frames), rate, actions and actions[start : start + count]
        )

    def actions(self) -> list[str] | None:
        """Read the action that led to each stored frame; None without a codec."""
        return None if self.codec is None else self._actions(len(self.times().starts))

    def _actions(self, stored: int) -> list[str] | None:
        if self.codec is None:
            return None
        if (form := self.recording_format) is None:
            return read_actions(self.path.with_suffix(".jsonl"), self.codec, stored)
        actions = form.actions(self.path)
        with naming(self.path):
            if len(actions) != stored:
                raise ValueError(f"expected {stored} actions (one per frame), got {len(actions)}")
            for action in dict.fromkeys(actions):
                self.codec.tokens_of(action)
        return actions


def recording_formats() -> dict[str, RecordingFormat]:
    """Return the families' recording formats by suffix, in lower case."""
    return {one.recordings.suffix: one.recordings for one in table.FAMILIES if one.recordings}


def prompt_suffixes() -> tuple[str, ...]:
    """Return the suffixes of all prompts: films, pictures, recordings."""
    return *FILM_SUFFIXES, *PICTURE_SUFFIXES, *recording_formats()


def find_clips(folder: Path, codec: ActionCodec | None = None) -> dict[str, ClipFile]:
    """List the clips below a folder by name: recordings if there are any, else videos."""
    known = (*FILM_SUFFIXES, *recording_formats())
    found, others = list_files(folder, "folder of clips", known, below=True)
    if not found:
        raise FileNotFoundError(f"no clips ({', '.join(known)}) in {folder}")
    recordings = [path for path in found if path.suffix.lower() in recording_formats()]
    beside = {path.with_suffix("") for path in recordings}
    paths = recordings or found
    others += [path for path in found if path not in paths and path.with_suffix("") not in beside]
    note_left_out(folder, others)
    clips: dict[str, ClipFile] = {}
    for path in paths:
        if (name := path.relative_to(folder).with_suffix("").as_posix()) in clips:
            raise ValueError(f"names of clips must differ, got {clips[name].path} and {path}")
        clips[name] = ClipFile(name, path, codec)
    return clips


def find_films(folder: Path) -> list[Path]:
    """List the videos below a folder by name; ValueError for recordings (no action names)."""
    clips = list(find_clips(folder).values())
    if clips[0].recording_format:
        raise ValueError(f"{clips[0].path}: training needs videos, got a recording")
    return [clip.path for clip in clips]
