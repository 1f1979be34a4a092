"""What makes a world of a model: its tokenizer, its actions, where a video may start.

These files lie in one folder, under the names that `generate`, `play`, `evaluate` and `study` look
for. `diagd tokenize` writes them beside the tokens, and training copies them to its model.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.video import read_video, video_length, write_video
from diagd.families.defaults import GenerationDefaults
from diagd.families.own_format import (
    ACTIONS_FILE,
    DEFAULTS_FILE,
    FORMER_DEFAULTS_FILE,
    TOKENIZER_FOLDER,
    write_defaults,
)
from diagd.files import copy_whole
from diagd.tokenizers.shards import STILL
from diagd.tokenizers.training import OF_TRAINING

PROMPT = "prompt.mp4"  # what is continued where nothing else is asked for
WALK = "walk.jsonl"  # and under which actions
SCENES_FOLDER = "scenes"
PARTS = (
    TOKENIZER_FOLDER,
    ACTIONS_FILE,
    DEFAULTS_FILE,
    FORMER_DEFAULTS_FILE,
    PROMPT,
    "prompt.jsonl",
    WALK,
    SCENES_FOLDER,
)
NUM_SCENES = 5
SCENE_FRAMES = 4
WALK_FRAMES = 16
CRF = 4  # of H.264: what a world starts from should look as it was recorded


def copy_parts(source: Path, folder: Path) -> None:
    """Copy what makes a world of a model, so that every command takes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        copy_whole(source / name, folder / name, OF_TRAINING)


def next_steps(folder: Path, tokens: Path) -> str:
    """Say what to do with a model that has just been trained on tokens."""
    if not (folder / TOKENIZER_FOLDER).is_dir():
        return (
            f"{folder} has no tokenizer, since {tokens} has none: "
            "the folder that diagd tokenize writes has one"
        )
    return (
        f"next: diagd play --model {folder}, or diagd generate --model {folder}; "
        f"diagd tune --model {folder} --tokens {tokens} finds its fastest strategy"
    )


def write_starts(
    folder: Path,
    clips: Sequence[Path],
    vocabulary: ActionVocabulary,
    size_px: tuple[int, int] | None = None,
) -> int:
    """Write a prompt, the walk that goes on from it, scenes and generation defaults.

    Args:
        folder: where to.
        clips: held-out videos, with their actions beside them unless nobody ever acts (`STILL`).
        vocabulary: the actions; written as well.
        size_px: height and width that frames are fitted to; default: as stored.

    Returns:
        How many scenes there are.
    """
    scenes = folder / SCENES_FOLDER
    shutil.rmtree(scenes, ignore_errors=True)
    scenes.mkdir(parents=True)
    vocabulary.save(folder / ACTIONS_FILE)
    for number, (path, share) in enumerate(_places(clips)):
        length, fps = video_length(path)
        given = min(SCENE_FRAMES, length)
        start = round(share * (length - given))
        goal = scenes / f"{path.stem}_{start:04d}.mp4" if number else folder / PROMPT
        actions = write_start(goal, path, start, vocabulary, size_px)
        if not number:
            write_actions(folder / WALK, actions[start + given :][:WALK_FRAMES] or actions)
            write_defaults(folder, GenerationDefaults(fps=float(fps), context_frames=given))
    return len(list(scenes.glob("*.mp4")))


def write_start(
    goal: Path,
    clip: Path,
    start: int,
    vocabulary: ActionVocabulary,
    size_px: tuple[int, int] | None = None,
) -> list[str]:
    """Write up to `SCENE_FRAMES` of a clip, and their actions beside them, as a place to start.

    Args:
        goal: the video to write.
        clip: the recorded video.
        start: the first of its frames.
        vocabulary: its actions.
        size_px: as in `write_starts`.

    Returns:
        All actions of the clip.
    """
    length, fps = video_length(clip)
    given = min(SCENE_FRAMES, length)
    video = read_video(clip, given, start=start, size_px=size_px)
    write_video(goal, video.frames, fps, CRF)
    actions = _actions(clip, vocabulary, length)
    write_actions(goal.with_suffix(".jsonl"), actions[start : start + given])
    return actions


def _places(clips: Sequence[Path]) -> Iterator[tuple[Path, float]]:
    """Spread the prompt and the scenes over the clips, and over the length of each."""
    count = NUM_SCENES + 1
    rounds = -(-count // len(clips))
    for number in range(count):
        path = clips[number % len(clips) if rounds > 1 else number * len(clips) // count]
        yield path, (number // len(clips) + 1) / (rounds + 1)


def _actions(path: Path, vocabulary: ActionVocabulary, num_frames: int) -> list[str]:
    if vocabulary == STILL:
        return [STILL.names[0]] * num_frames
    return read_actions(path.with_suffix(".jsonl"), vocabulary, num_frames)
