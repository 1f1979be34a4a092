"""Look through recorded clips before anything is trained on them: what is wrong, what is there.

A clip is NAME.mp4 with NAME.jsonl beside it, one action a frame; row t is the action that led to
frame t (`diagd.data.actions`).
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from diagd.console import track
from diagd.data.action_timing import RowTiming, movement_between, row_timing
from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.video import read_video
from diagd.tokenizers.shards import STILL, actions_of
from diagd.tokenizers.training import find_clips

STILL_LEVELS = 0.1  # of 255: mean change from frame to frame, which compression alone makes
RARE_SHARE = 0.01  # of the frames, below which an action is hardly learnt
WRONG_ROWS = {
    -1: (
        "row t - 1 led to frame t, so row t is the action taken after frame t (or the game answers "
        'one frame late); to mend it write {"action": "none"} as the first row, drop the last one'
    ),
    1: (
        "row t + 1 led to frame t, so the rows come one frame late; to mend it drop the first row, "
        "and the last frame, which then has none"
    ),
}


@dataclass(frozen=True)
class CheckedClip:
    """A clip that can be read.

    Attributes:
        path: of the video.
        size_px: (height_px, width_px) of its frames.
        fps: frames per second.
        actions: one a frame; None without an action file.
        movement: (T - 1, D), see `movement_between`.
        changes: (T - 1,) mean absolute change of a pixel into each frame but the first, of 255.
    """

    path: Path
    size_px: tuple[int, int]
    fps: Fraction
    actions: list[str] | None
    movement: Tensor
    changes: Tensor


@dataclass(frozen=True)
class ActionUse:
    """How an action is used: frames it led to, how long it is held, what it changes.

    Attributes:
        frames: how many.
        share: of all frames but the first ones.
        held_frames: for how many frames it is kept, on average; 0 where it is never used.
        change: of a pixel into a frame of the action, mean absolute, of 255.
    """

    frames: int
    share: float
    held_frames: float
    change: float


@dataclass(frozen=True)
class ClipsReport:
    """What a folder of clips holds.

    Attributes:
        clips: those that can be used.
        problems: what makes others useless, or the rows wrong; a line each.
        notes: what can be trained on, but will disappoint; a line each.
        uses: action -> how it is used; empty without action files.
        timing: which row led to which frame; None without action files.
    """

    clips: list[CheckedClip]
    problems: list[str]
    notes: list[str]
    uses: dict[str, ActionUse]
    timing: RowTiming | None


def check_clips(folder: Path) -> ClipsReport:
    """Read all clips of a folder and say what is wrong with them, all of it at once.

    Args:
        folder: of videos, with action files beside them or without.

    Raises:
        FileNotFoundError: no folder, or no videos in it.
        ValueError: `actions.json` is no vocabulary.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of clips not found: {folder}")
    paths = find_clips(folder)
    acted = [path for path in paths if path.with_suffix(".jsonl").is_file()]
    vocabulary = actions_of(acted) if acted else STILL
    clips: list[CheckedClip] = []
    problems: list[str] = []
    for path in track(paths, "reading clips"):
        try:
            clip = _read(path, vocabulary if acted else None)
            if clips:
                _compare(clip, clips[0])
        except (FileNotFoundError, ValueError) as error:
            problems.append(str(error))
        else:
            clips.append(clip)
    timing = None
    uses: dict[str, ActionUse] = {}
    if acted and clips:
        ids = [
            torch.tensor([vocabulary.id_of(name) for name in clip.actions or []]) for clip in clips
        ]
        timing = row_timing([clip.movement for clip in clips], ids)
        uses = {name: _use(name, clips) for name in vocabulary.names}
        problems += [WRONG_ROWS[timing.found]] if timing.found in WRONG_ROWS else []
    notes = _notes(clips, uses)
    if not acted:
        notes.append("there are no action files (NAME.jsonl beside NAME.mp4): nobody acts")
    return ClipsReport(clips, problems, notes, uses, timing)


def _read(path: Path, vocabulary: ActionVocabulary | None) -> CheckedClip:
    video = read_video(path)
    if len(video.frames) < 2:
        raise ValueError(f"{path}: expected at least 2 frames, got {len(video.frames)}")
    actions = None
    if vocabulary is not None:
        actions = read_actions(path.with_suffix(".jsonl"), vocabulary, len(video.frames))
    changes = video.frames.float().diff(dim=0).abs().mean(dim=(1, 2, 3))
    height_px, width_px = video.frames.shape[1:3]
    movement = movement_between(video.frames)
    return CheckedClip(path, (height_px, width_px), video.fps, actions, movement, changes)


def _compare(clip: CheckedClip, first: CheckedClip) -> None:
    if clip.size_px != first.size_px:
        raise ValueError(
            f"{clip.path}: expected frames of {first.size_px[0]}x{first.size_px[1]} px as in "
            f"{first.path.name}, got {clip.size_px[0]}x{clip.size_px[1]}"
        )
    if abs(clip.fps / first.fps - 1) > 0.01:
        raise ValueError(
            f"{clip.path}: expected {float(first.fps):g} frames a second as in {first.path.name}, "
            f"got {float(clip.fps):g}"
        )


def _use(name: str, clips: list[CheckedClip]) -> ActionUse:
    """Count an action; the rows of first frames, which led to nothing, are left out."""
    rows = [(clip.actions or [])[1:] for clip in clips]
    changes = [
        change
        for clip, taken in zip(clips, rows, strict=True)
        for action, change in zip(taken, clip.changes.tolist(), strict=True)
        if action == name
    ]
    holds = [len(list(held)) for taken in rows for action, held in groupby(taken) if action == name]
    total = sum(map(len, rows))
    return ActionUse(
        len(changes),
        len(changes) / total,
        fmean(holds) if holds else 0.0,
        fmean(changes) if changes else 0.0,
    )


def _notes(clips: list[CheckedClip], uses: dict[str, ActionUse]) -> list[str]:
    notes = [
        f"{clip.path}: nothing moves in it" for clip in clips if clip.changes.mean() < STILL_LEVELS
    ]
    never = [name for name, use in uses.items() if not use.frames]
    rarely = [name for name, use in uses.items() if 0 < use.share < RARE_SHARE]
    if never:
        notes.append(f"never used, so the world cannot learn them: {', '.join(never)}")
    if rarely:
        notes.append(f"used in less than 1% of the frames: {', '.join(rarely)}")
    if uses and len(uses) - len(never) < 2:
        notes.append("only one action is ever used: nobody could steer this world")
    return notes
