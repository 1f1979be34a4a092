"""Make the bundled world of a trained one: as small as it gets, with starts chosen by eye.

The transformer is stored in bfloat16, beside what makes a world of it, places to start cut from
held-out clips, and the walk that `generate` takes by default.

    python runs/bundle.py --world work/doom/world --clips work/doom/heldout \
        --out diagd/assets/doom --prompt clip_1300004:20 \
        --scenes lamps=clip_1000003:54 medicine=clip_1200000:42
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from diagd.data.actions import ActionVocabulary, parse_actions, read_actions, write_actions
from diagd.data.video import read_video, write_video
from diagd.families.checkpoints import load_model
from diagd.families.own_format import ACTIONS_FILE, save_model
from diagd.training.world_parts import (
    CRF,
    PROMPT,
    SCENE_FRAMES,
    SCENES_FOLDER,
    WALK,
    copy_parts,
)


@dataclass(frozen=True)
class Options:
    """Bundle a world model."""

    world: Path  # folder of diagd train
    clips: Path  # folder of held-out clips (mp4 with their jsonl) that give the starts
    out: Path
    prompt: str  # what generate goes on from: CLIP:FRAME, the first of four
    scenes: tuple[str, ...] = ()  # where play may start beside it: NAME=CLIP:FRAME
    walk: str = "forward*6,left*4,forward*6"  # actions that generate takes by default


def main(options: Options) -> None:
    """Write the folder."""
    starts = {options.out / PROMPT: options.prompt}
    for scene in options.scenes:
        name, _, place = scene.partition("=")
        starts[options.out / SCENES_FOLDER / f"{name}.mp4"] = place
    copy_parts(options.world, options.out)
    save_model(load_model(options.world, dtype=torch.bfloat16), options.out)
    vocabulary = ActionVocabulary.load(options.out / ACTIONS_FILE)
    write_actions(options.out / WALK, parse_actions(options.walk, vocabulary))
    shutil.rmtree(options.out / SCENES_FOLDER, ignore_errors=True)
    (options.out / SCENES_FOLDER).mkdir()
    for path, place in starts.items():
        cut(options.clips, place, path, vocabulary)


def cut(clips: Path, place: str, path: Path, vocabulary: ActionVocabulary) -> None:
    """Write the frames of a CLIP:FRAME, and their actions beside them."""
    name, _, frame = place.partition(":")
    clip, chosen = clips / f"{name}.mp4", slice(int(frame), int(frame) + SCENE_FRAMES)
    video = read_video(clip)
    actions: Sequence[str] = read_actions(clip.with_suffix(".jsonl"), vocabulary, len(video.frames))
    write_video(path, video.frames[chosen], video.fps, CRF)
    write_actions(path.with_suffix(".jsonl"), actions[chosen])


if __name__ == "__main__":
    main(tyro.cli(Options))
