"""Validate recorded clips before training: files, actions, and which row led to which frame.

diagd check clips
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from diagd.console import make_console, print_table, track
from diagd.data.actions import read_actions
from diagd.data.vectors import OwnActions, VectorActions
from diagd.data.video import read_video
from diagd.families.clip_files import find_films
from diagd.tokenizers.shards import STILL, actions_of
from diagd.training.options import CheckOptions

STILL_LEVELS = 0.1  # of 255: mean change between frames that compression alone causes
RARE_SHARE = 0.01  # of the frames, below which an action is hardly learned
WRONG_ROWS = {
    -1: (
        "row t - 1 led to frame t, so row t is the action taken after frame t (or "
        'the game responds late); to fix it, write {"action": "none"} as row 0, drop the last'
    ),
    1: (
        "row t + 1 led to frame t, so rows are one frame late; to fix it, drop the first row and "
        "the last frame, which then has none"
    ),
}
SHIFTS = (-1, 0, 1)  # from the frame's own row to the row tested
SCALES = (((24, 36), (3, 4)), ((12, 18), (2, 3)))  # picture sizes, and the block sizes compared
REACH_PX = 6  # maximum shift of the whole of the larger picture
COMPONENTS = 16  # of the movement
ROWS_BEFORE = 2
RIDGE = 0.1  # of the variance of a regressor
CHUNK_FRAMES = 32  # unit for means and errors of gains
MIN_CHUNKS = 8
FOLDS = 8
SURE = 4.0  # standard errors
STANDS_OUT = 3.0  # times the gain of rows that it could be confused with


@dataclass(frozen=True)
class RowTiming:
    """Evidence for each shift of action rows; empty if it cannot be measured."""

    gains: dict[int, float]  # as defined in `row_timing`
    scores: dict[int, float]  # gains in standard errors

    @property
    def found(self) -> int | None:
        """The row that led to frame t, counted from row t; None if unclear.

        It must stand out from the rows after it. Rows before it have a gain as well, as bodies have
        inertia. A later row has one only if the player reacts to the movement immediately, which
        looks like a late row: so a later row must stand out from all.
        """
        if not self.gains:
            return None
        best = max(self.gains, key=self.gains.__getitem__)
        rivals = [s for s in SHIFTS if s > best or s < best == max(SHIFTS)]
        stands_out = self.gains[best] > STANDS_OUT * max(self.gains[shift] for shift in rivals)
        return best if stands_out and self.scores[best] >= SURE else None


@dataclass(frozen=True)
class CheckedClip:
    path: Path
    size_px: tuple[int, int]
    fps: Fraction
    actions: list[str]  # one per frame; none without an action file
    movement: Tensor  # (T - 1, D), see `movement_between`
    changes: list[float]  # mean absolute change of pixels into each frame but the first, of 255


@dataclass(frozen=True)
class ActionUse:
    """Statistics of an action; all 0 if it is never used."""

    frames: int  # frames that it led to
    share: float  # of all frames but the first ones
    held_frames: float  # average number of frames for which it is held
    change: float  # mean absolute change of pixels into a frame of the action, of 255


@dataclass(frozen=True)
class ClipsReport:
    clips: list[CheckedClip]  # usable clips
    problems: list[str]  # a line for each unusable clip, and for wrong rows
    notes: list[str]  # a line for each thing that can be trained on but will disappoint
    uses: dict[str, ActionUse]  # by action; empty without action files
    timing: RowTiming | None  # None without action files

    @property
    def num_frames(self) -> int:
        return sum(1 + len(clip.changes) for clip in self.clips)


def check_clips(folder: Path) -> ClipsReport:
    """Read all clips of a folder, with or without action files, and list all problems."""
    paths = find_films(folder)
    acted = [path for path in paths if path.with_suffix(".jsonl").is_file()]
    vocabulary = actions_of(acted) if acted else STILL
    clips: list[CheckedClip] = []
    problems: list[str] = []
    for path in track(paths, "reading clips"):
        try:
            clips.append(_read(path, vocabulary if acted else None, clips[0] if clips else None))
        except (FileNotFoundError, ValueError) as error:
            problems.append(str(error))
    still = [clip.path for clip in clips if fmean(clip.changes) < STILL_LEVELS]
    notes = [f"{path}: no motion" for path in still]
    if not acted:
        notes.append("no action files (NAME.jsonl beside NAME.mp4): the world will have no actions")
    if not acted or not clips:
        return ClipsReport(clips, problems, notes, {}, None)
    ids = [torch.tensor([*map(vocabulary.names.index, clip.actions)]) for clip in clips]
    if (timing := row_timing([clip.movement for clip in clips], ids)).found in WRONG_ROWS:
        wrong = WRONG_ROWS[timing.found]
        if isinstance(vocabulary, VectorActions):
            notes.append(
                f"right if actions are forces, which move things a frame later; or {wrong}"
            )
        else:
            problems.append(wrong)
    uses = {name: _use(name, clips) for name in vocabulary.names}
    never = [name for name, use in uses.items() if not use.frames]
    rarely = [name for name, use in uses.items() if 0 < use.share < RARE_SHARE]
    if never:
        notes.append(f"actions never used, which the world cannot learn: {', '.join(never)}")
    if rarely:
        notes.append(f"actions used in less than 1% of the frames: {', '.join(rarely)}")
    if len(uses) - len(never) < 2:
        notes.append("only one action is used: this world cannot be controlled")
    return ClipsReport(clips, problems, notes, uses, timing)


def _read(path: Path, vocabulary: OwnActions | None, first: CheckedClip | None) -> CheckedClip:
    """Read a clip; ValueError unless it matches the first one, if there is one."""
    video = read_video(path)
    frames, size_px = video.frames, (video.frames.shape[1], video.frames.shape[2])
    if len(frames) < 2:
        raise ValueError(f"{path}: expected at least 2 frames, got {len(frames)}")
    actions: list[str] = []
    if vocabulary is not None:
        read = read_actions(path.with_suffix(".jsonl"), vocabulary, len(frames))
        actions = [vocabulary.nearest_name(action) for action in read]
    if first and size_px != first.size_px:
        expected, given = ("x".join(map(str, size)) for size in (first.size_px, size_px))
        raise ValueError(
            f"{path}: expected frames of {expected} px as in {first.path.name}, got {given}"
        )
    if first and abs(video.fps / first.fps - 1) > 0.01:
        raise ValueError(
            f"{path}: expected {float(first.fps):g} frames/s as in {first.path.name}, "
            f"got {float(video.fps):g}"
        )
    changes = frames.float().diff(dim=0).abs().mean(dim=(1, 2, 3)).tolist()
    return CheckedClip(path, size_px, video.fps, actions, movement_between(frames), changes)


def _use(name: str, clips: list[CheckedClip]) -> ActionUse:
    """Count an action; rows of first frames, which led to nothing, are skipped."""
    total, holds, changes = 0, list[int](), list[float]()
    for clip in clips:
        rows = clip.actions[1:]
        total += len(rows)
        holds += [len(list(held)) for action, held in groupby(rows) if action == name]
        changes += [c for row, c in zip(rows, clip.changes, strict=True) if row == name]
    used = len(changes)
    return ActionUse(used, used / total, fmean(holds or [0.0]), fmean(changes or [0.0]))


def movement_between(frames: Tensor) -> Tensor:
    """Describe the motion between (T, H_px, W_px, 3) uint8 frames, cheaply: (T - 1, D) float.

    Per block, at two sizes: horizontal and vertical motion (change of brightness along its slope),
    and the amount of change. For the whole: how well a shift in each direction explains the change.
    """
    grey = frames.float().mean(dim=-1)[:, None] / 255
    pictures = [functional.interpolate(grey, size_px, mode="area")[:, 0] for size_px, _ in SCALES]
    parts = []
    for small, (_, blocks) in zip(pictures, SCALES, strict=True):
        change, middle = small.diff(dim=0), (small[1:] + small[:-1]) / 2
        down, across = torch.gradient(middle, dim=(1, 2))
        kinds = torch.stack([-change * down, -change * across, down**2 + across**2, change.abs()])
        means = functional.adaptive_avg_pool2d(kinds, blocks).flatten(2)
        steepness = means[2].add(1e-3).sqrt()
        parts += [means[0] / steepness, means[1] / steepness, means[3].sqrt()]
    height, width = (side - 2 * REACH_PX for side in pictures[0].shape[1:])
    windows = pictures[0].unfold(1, height, 1).unfold(2, width, 1)  # (T, i, j, height, width)
    here = windows[1:, REACH_PX, REACH_PX]
    steps = range(2 * REACH_PX + 1)
    shifts = [*((REACH_PX, j) for j in steps), *((i, REACH_PX) for i in steps if i != REACH_PX)]
    errors = [(windows[:-1, i, j] - here).abs().mean(dim=(1, 2)) for i, j in shifts]
    whole = torch.stack(errors, dim=1)
    return torch.cat([*parts, whole / (whole.mean(dim=1, keepdim=True) + 1e-3)], dim=1)


def row_timing(movements: Sequence[Tensor], actions: Sequence[Tensor]) -> RowTiming:
    """Measure which row led to a frame; empty for too few frames, motion or actions.

    Inputs are each clip's movement, (T - 1, D), and action ids, (T,) int64. Row t should be the
    action that led to frame t. A recorder that writes the action *after* frame t is off by one, and
    a model trained on its clips responds to every key one frame late. So we measure what the
    movement into frame t tells about rows t - 1, t and t + 1. People hold a key for many frames,
    and bodies keep moving, so neighbouring rows look alike; only what the movement tells *beyond*
    the two rows before, and the movement before, counts:

        gain = 1 - error(row | rows before, movement before, movement)
                   / error(row | rows before, movement before)

    with errors of ridge regressions on frames that they did not see. The row that led to the frame
    has a gain; a later one, not yet chosen by the player, has almost none, and an earlier one has
    less.
    """
    ids, nothing = torch.cat([torch.zeros(0, dtype=torch.int64), *actions]), RowTiming({}, {})
    is_still = not any(movement.std() > 0 for movement in movements)
    if is_still or len(ids.unique()) < 2 or sum(map(len, movements)) < 2:
        return nothing
    together = torch.cat(list(movements))
    mean, spread = together.mean(dim=0), together.std(dim=0) + 1e-6
    standard = ((together - mean) / spread).clamp(-3, 3)
    _, directions = torch.linalg.eigh(standard.T @ standard / len(standard))
    projected = standard @ directions[:, -COMPONENTS:]
    principal = projected.split([len(movement) for movement in movements])
    rows = [functional.one_hot(action, int(ids.max()) + 1).float() for action in actions]
    gains, scores = dict[int, float](), dict[int, float]()
    for shift in SHIFTS:
        samples = [_samples(m, r, shift) for m, r in zip(principal, rows, strict=True)]
        numbers = [chunks + (clip << 32) for clip, (*_, chunks) in enumerate(samples)]
        given, seen, wanted, _ = (torch.cat(parts) for parts in zip(*samples, strict=True))
        _, chunks = torch.cat(numbers).unique(return_inverse=True)
        if len(chunks.unique()) < MIN_CHUNKS:
            return nothing
        both = torch.cat([given, seen], dim=1)
        without, beside = (
            torch.bincount(chunks, _errors(inputs, wanted, chunks)) for inputs in (given, both)
        )
        saved = without - beside
        gains[shift] = (saved.sum() / without.sum().clamp(min=1e-9)).item()
        spread = saved.std().item() / math.sqrt(len(saved))
        scores[shift] = saved.mean().item() / max(spread, 1e-9)
    return RowTiming(gains, scores)


def _samples(movement: Tensor, rows: Tensor, shift: int) -> tuple[Tensor, ...]:
    """Return known inputs, observation, target row and chunk of each frame."""
    first = 1 + ROWS_BEFORE + max(SHIFTS)  # the row of frame 0 led to nothing
    frames = torch.arange(first, max(first, len(rows) - max(SHIFTS)))
    before = [rows[frames + shift - back] for back in range(1, ROWS_BEFORE + 1)]
    given = torch.cat([*before, movement[frames - 2]], dim=1)
    last = max(len(frames) // CHUNK_FRAMES - 1, 0)  # includes the remainder
    chunks = (torch.arange(len(frames)) // CHUNK_FRAMES).clamp(max=last)
    return given, movement[frames - 1], rows[frames + shift], chunks


def _errors(inputs: Tensor, wanted: Tensor, chunks: Tensor) -> Tensor:
    """Return each sample's squared error (N,), predicted from the chunks of other folds."""
    errors = torch.zeros(len(wanted))
    folds = chunks % FOLDS
    for fold in range(FOLDS):
        learn, test = folds != fold, folds == fold
        mean, spread = inputs[learn].mean(dim=0), inputs[learn].std(dim=0) + 1e-6
        scaled = ((inputs - mean) / spread).clamp(-3, 3)
        target = wanted - wanted[learn].mean(dim=0)
        known = scaled[learn]
        ridge = RIDGE * len(known) * torch.eye(known.shape[1])
        weights = torch.linalg.solve(known.T @ known + ridge, known.T @ target[learn])
        errors[test] = (target[test] - scaled[test] @ weights).square().sum(dim=1)
    return errors


SHOWN_FRAMES = 6
ROWS = {-1: "row t - 1", 0: "row t", 1: "row t + 1"}


def main(options: CheckOptions) -> dict[str, Any]:
    """Print the contents of clips; ValueError if they cannot be used for training."""
    report = check_clips(options.clips)
    _print_report(report)
    if report.problems:
        more = len(report.problems) - 1
        raise ValueError(report.problems[0] + (f" (and {more} more, see above)" if more else ""))
    first, timing = report.clips[0], report.timing
    return {
        "clips": len(report.clips),
        "frames": report.num_frames,
        "size_px": first.size_px,
        "fps": float(first.fps),
        "actions": {name: asdict(use) for name, use in report.uses.items()},
        "timing": timing and {"found": timing.found, **asdict(timing)},
        "notes": report.notes,
    }


def _print_report(report: ClipsReport) -> None:
    console = make_console()
    if report.clips:
        first = report.clips[0]
        size, seconds = "x".join(map(str, first.size_px)), round(report.num_frames / first.fps)
        console.print(
            f"{len(report.clips)} clips, {report.num_frames} frames of {size} px, "
            f"{float(first.fps):g} frames/s: {seconds // 60}:{seconds % 60:02d} minutes"
        )
        if report.timing is not None:
            _print_actions(console, first, report.uses, report.timing)
    for kind, lines in (("note", report.notes), ("problem", report.problems[1:])):
        for line in lines:
            console.print(f"{kind}: {line}")


def _print_actions(
    console: Console, first: CheckedClip, uses: dict[str, ActionUse], timing: RowTiming
) -> None:
    """Show how rows and frames correspond, how actions are used, and which row led to a frame."""
    actions = first.actions
    changes = (t for t in range(2, len(actions)) if actions[t] != actions[t - 1])
    start = max(min(next(changes, 2) - 2, len(actions) - SHOWN_FRAMES), 0)
    console.print(
        "Row t of an action file, counted from 0, is read as the action that led from frame t - 1 "
        f"to frame t. In {first.path.name}:"
    )
    for t in range(start, min(start + SHOWN_FRAMES, len(actions))):
        came = f"frame {t - 1} -> {actions[t]} -> " if t else f"({actions[0]}, at the start) "
        console.print(f"  row {t}: {came}frame {t}")
    cells = "{0.frames} {0.share:.1%} {0.held_frames:.1f} {0.change:.1f}"
    lines = [[name, *cells.format(use).split()] for name, use in uses.items()]
    print_table(console, "", ["action", "frames", "share", "held for", "change"], lines)
    console.print("held for: average number of frames; change: of a pixel between frames, of 255")
    if timing.gains:
        lines = []
        for n, gain in timing.gains.items():
            name = ROWS[n] + " <-" * (n == timing.found)
            lines.append([name, f"{max(gain, 0):.1%}", f"{timing.scores[n]:.1f}"])
        print_table(console, "", ["frame t predicts", "gain", "standard errors"], lines)
        console.print("gain: how much the movement into frame t adds to the rows before")
    if timing.found == 0:
        console.print("Row t led to frame t, as expected.")
    elif timing.found is None:
        why = "more clips may help" if timing.gains else "too few frames, actions or movement"
        console.print(f"The row that led to frame t is unclear from these pictures: {why}.")
