"""Make the bundled world of a trained one: as small as it gets, with a prompt chosen by eye.

The transformer is stored in bfloat16, beside the tokenizer, the action names, a prompt cut from a
held-out clip, and the walk that `generate` takes by default.

    python runs/bundle.py --world work/doom/model --clip work/doom/heldout/clip_1000003.mp4 \
        --out diagd/assets/doom
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from diagd.data.actions import ActionVocabulary, parse_actions, read_actions, write_actions
from diagd.data.video import read_video, write_video
from diagd.families.checkpoints import load_model
from diagd.families.own_format import ACTIONS_FILE, TOKENIZER_FOLDER, save_model
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.world_parts import CRF, PROMPT, WALK


@dataclass(frozen=True)
class Options:
    """Bundle a world model."""

    world: Path  # folder of diagd train
    clip: Path  # held-out clip (mp4 with its jsonl) that gives the prompt
    out: Path
    first_frame: int = 0  # of the prompt within the clip
    frames: int = 4  # of the prompt
    walk: str = "forward*6,left*4,forward*6"  # actions that generate takes by default


def main(options: Options) -> None:
    """Write the folder."""
    save_model(load_model(options.world, dtype=torch.bfloat16), options.out)
    tokenizer = VQTokenizer.from_pretrained(options.world / TOKENIZER_FOLDER)
    tokenizer.save_pretrained(options.out / TOKENIZER_FOLDER)
    vocabulary = ActionVocabulary.load(options.world / ACTIONS_FILE)
    vocabulary.save(options.out / ACTIONS_FILE)
    video = read_video(options.clip)
    chosen = slice(options.first_frame, options.first_frame + options.frames)
    prompt = options.out / PROMPT
    write_video(prompt, video.frames[chosen], video.fps, CRF)
    actions = read_actions(options.clip.with_suffix(".jsonl"), vocabulary, len(video.frames))
    write_actions(prompt.with_suffix(".jsonl"), actions[chosen])
    write_actions(options.out / WALK, parse_actions(options.walk, vocabulary))


if __name__ == "__main__":
    main(tyro.cli(Options))
