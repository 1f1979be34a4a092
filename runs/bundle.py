"""Make the bundled world of a trained one: as small as it gets, with starts chosen by eye.

The transformer is stored in bfloat16, beside what makes a world of it, places to start cut from
held-out clips, and the walk that `generate` takes by default.

    python runs/bundle.py --world work/doom/world --clips work/doom/heldout \
        --out diagd/assets/doom --prompt clip_1300004:20 \
        --scenes lamps=clip_1000003:54 medicine=clip_1200000:42
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from diagd.data.actions import ActionVocabulary, parse_actions, write_actions
from diagd.families.checkpoints import (
    ACTIONS_FILE,
    find_model,
    load_model,
    save_model,
    write_defaults,
)
from diagd.training.corpus import copy_parts, write_start


@dataclass(frozen=True)
class Options:
    """Bundle a world model."""

    world: Path  # folder of diagd train
    clips: Path  # folder of held-out clips (mp4 with their jsonl) that give the starts
    out: Path
    prompt: str  # what generate goes on from: CLIP:FRAME, the first of four
    scenes: tuple[str, ...] = ()  # where play may start beside it: NAME=CLIP:FRAME
    walk: str = "forward*6,left*4,forward*6"  # actions that generate takes by default
    top_p: float | None = None  # how it is sampled by default, if not as the trained world
    remember: int | None = None  # frames that it sees by default, if not all that it holds
    blend: str | None = None  # FOLDER=SHARE of an earlier stage, whose weights are mixed in


def main(options: Options) -> None:
    """Write the folder."""
    starts = {options.out / "prompt.mp4": options.prompt}
    for scene in options.scenes:
        name, _, place = scene.partition("=")
        starts[options.out / "scenes" / f"{name}.mp4"] = place
    copy_parts(options.world, options.out)
    model = load_model(options.world)
    if options.blend:
        folder, _, share = options.blend.rpartition("=")
        for name, earlier in load_model(folder).state_dict().items():
            model.state_dict()[name].lerp_(earlier, float(share))
    save_model(model.to(torch.bfloat16), options.out)
    found = find_model(str(options.out))
    given = {"top_p": options.top_p, "remember": options.remember}
    changed = {name: value for name, value in given.items() if value is not None}
    write_defaults(options.out, replace(found.defaults, **changed))
    vocabulary = ActionVocabulary.load(options.out / ACTIONS_FILE)
    write_actions(options.out / "walk.jsonl", parse_actions(options.walk, vocabulary))
    shutil.rmtree(options.out / "scenes", ignore_errors=True)
    (options.out / "scenes").mkdir()
    for path, place in starts.items():
        clip, _, frame = place.partition(":")
        write_start(path, options.clips / f"{clip}.mp4", int(frame), vocabulary)


if __name__ == "__main__":
    main(tyro.cli(Options))
