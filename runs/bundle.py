"""Put a trained world model into a folder that `diagd generate --model` takes, as small as it gets.

The transformer is stored in bfloat16, beside the tokenizer, the action names, a prompt cut from a
held-out clip, and the walk that `generate` takes by default.

    python runs/bundle.py --model work/doom/model --tokenizer work/doom/tokenizer \
        --clip work/doom/heldout/clip_1000003.mp4 --out diagd/assets/doom
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from diagd.data.actions import ActionVocabulary, parse_actions, read_actions, write_actions
from diagd.data.video import read_video, write_video
from diagd.families.checkpoints import load_model
from diagd.families.own_format import save_model
from diagd.tokenizers.vq import VQTokenizer


@dataclass(frozen=True)
class Options:
    """Bundle a world model."""

    model: Path  # checkpoint folder of diagd train
    tokenizer: Path  # folder of diagd tokenize
    clip: Path  # held-out clip (mp4 with its jsonl) that gives the prompt
    out: Path
    first_frame: int = 0  # of the prompt within the clip
    frames: int = 4  # of the prompt
    walk: str = "forward*6,left*4,forward*6"  # actions that generate takes by default


def main(options: Options) -> None:
    """Write the folder."""
    save_model(load_model(options.model, dtype=torch.bfloat16), options.out)
    VQTokenizer.from_pretrained(options.tokenizer).save_pretrained(options.out / "tokenizer")
    shutil.copy(options.model / "actions.json", options.out / "actions.json")
    vocabulary = ActionVocabulary.load(options.out / "actions.json")
    video = read_video(options.clip)
    chosen = slice(options.first_frame, options.first_frame + options.frames)
    write_video(options.out / "prompt.mp4", video.frames[chosen], video.fps, crf=4)
    actions = read_actions(options.clip.with_suffix(".jsonl"), vocabulary, len(video.frames))
    write_actions(options.out / "prompt.jsonl", actions[chosen])
    walk = parse_actions(options.walk, vocabulary)
    write_actions(options.out / "walk.jsonl", walk)


if __name__ == "__main__":
    main(tyro.cli(Options))
