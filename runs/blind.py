"""Record episodes twice: as their player plays them, and blindly, with the actions of another one.

    python -m runs.blind --scenario maze --out work/blind --count 160 --first-seed 9000000

A player sees walls and turns away; whoever walks in a dream, or in a game with another episode's
actions, runs into them. Worlds learn from both, and dreams are compared with blind games
(`runs/drift.py`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import tyro

from diagd.console import track
from diagd.data.actions import write_actions
from diagd.data.recorders.doom import DoomGame, open_doom
from diagd.data.recorders.options import RecordOptions
from diagd.data.recorders.recording import clip_paths
from diagd.data.video import write_video
from runs.kills import REPEAT, Played, play

CONTEXT = 4  # frames at the start, in which both ways are the player's
BLIND = 50_000  # added to an episode's seed: the name of its blind clip


@dataclass(frozen=True)
class Options:
    """Record a scenario both ways into one folder; nothing is recorded where all clips are."""

    out: Path
    scenario: str
    count: int  # episodes; there are twice as many clips
    first_seed: int
    frames: int = 64


def pairs(game: DoomGame, frames: int, first_seed: int) -> Iterator[tuple[int, Played, Played]]:
    """Play episodes of which both ways last; yield the seed, the player's way and the blind one."""
    actions = None
    for seed in itertools.count(first_seed):
        if (seen := play(game, seed, frames)) is None:
            continue
        if actions is not None:
            told = [*seen.actions[1:CONTEXT], *actions[CONTEXT:]]
            if (blind := play(game, seed, frames, told)) is not None:
                yield seed, seen, blind
        actions = seen.actions


def record(
    scenario: str, folders: tuple[Path, Path], frames: int, count: int, first_seed: int
) -> None:
    """Write clips of both ways, each with its actions, to a folder each."""
    with open_doom(RecordOptions(out=folders[0], scenario=scenario)) as game:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            game.actions.save(folder / "actions.json")
        found = itertools.islice(pairs(game, frames, first_seed), count)
        for seed, *ways in track(found, f"recording {scenario}", count):
            for folder, name, played in zip(folders, (seed, seed + BLIND), ways, strict=True):
                video, actions = clip_paths(folder, name)
                write_actions(actions, played.actions)
                write_video(video, played.pictures, game.steps_per_second / Fraction(REPEAT))


def main(options: Options) -> None:
    """Record, unless as many clips are there."""
    names = range(options.first_seed, options.first_seed + 2 * BLIND)
    there = [name for name in names if all(map(Path.is_file, clip_paths(options.out, name)))]
    if len(there) < 2 * options.count:
        folders = options.out, options.out
        record(options.scenario, folders, options.frames, options.count, options.first_seed)


if __name__ == "__main__":
    main(tyro.cli(Options))
