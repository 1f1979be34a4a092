"""Carry what a world has learnt over to another tokenizer, and to more actions, to train on there.

    python runs/transplant.py --world maze --tokens work/doom/tokens \
        --clips work/doom/train --out work/doom/start
    diagd finetune --init work/doom/start --tokens work/doom/tokens --out world

Both tokenizers encode the same frames into grids of one size. A new code takes the mean of what the
old codes at its places had learnt, and a new action that of the known actions in its name. All else
stays. Training has to follow: the new model knows what stands where, and not yet how often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.progress import track
from torch import Tensor

from diagd.data.actions import ActionVocabulary
from diagd.data.video import read_video
from diagd.families.checkpoints import (
    ACTIONS_FILE,
    TOKENIZER_FOLDER,
    load_model,
    model_path,
    write_checkpoint,
)
from diagd.families.clip_files import find_films
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.corpus import copy_parts

PER_CODE = ("model.embed_tokens.weight", "lm_head.weight")  # a row for each code, then each action


@dataclass(frozen=True)
class Options:
    """Make a world for the tokens of another tokenizer."""

    world: str  # a folder, or the name of a bundled world
    tokens: Path  # folder that diagd tokenize wrote: of the other tokenizer and actions
    clips: Path  # folder of clips that both tokenizers are shown
    out: Path  # folder of the new world
    num_clips: int = 256  # evenly spread over the folder
    frame_stride: int = 8  # every n-th frame of them


def main(options: Options) -> None:
    """Write the new world."""
    source = model_path(options.world)
    model = load_model(source)
    old, new = (
        VQTokenizer.from_pretrained(folder / TOKENIZER_FOLDER)
        for folder in (source, options.tokens)
    )
    names, new_names = (
        ActionVocabulary.load(folder / ACTIONS_FILE).names for folder in (source, options.tokens)
    )
    paths = find_films(options.clips)
    chosen = paths[:: max(1, len(paths) // options.num_clips)][: options.num_clips]
    shares = torch.block_diag(
        code_shares(old, new, chosen, options.frame_stride), action_shares(names, new_names)
    )
    weights = model.state_dict()
    for name in weights.keys() & PER_CODE:
        weights[name] = shares @ weights[name]
    codes = new.codebook_size
    config = replace(model.config, image_vocab_size=codes, vocab_size=codes + len(new_names))
    copy_parts(options.tokens, options.out)
    write_checkpoint(options.out, config, weights)


def code_shares(old: VQTokenizer, new: VQTokenizer, clips: Sequence[Path], stride: int) -> Tensor:
    """Return which old codes stand where a new one does, (new, old) float32; rows add up to 1."""
    counts = torch.zeros(new.codebook_size, old.codebook_size)
    for path in track(clips, description="showing frames to both tokenizers"):
        frames = read_video(path).frames[::stride]
        places = new.encode(frames).flatten(), old.encode(frames).flatten()
        counts.index_put_(places, torch.ones(()), accumulate=True)
    counts[counts.sum(1) == 0] = counts.sum(0)  # never seen: like any
    return counts / counts.sum(1, keepdim=True)


def action_shares(names: Sequence[str], new_names: Sequence[str]) -> Tensor:
    """Return the shares of old actions in new ones: `left+attack` is `left` where that is known."""
    shares = torch.zeros(len(new_names), len(names))
    for row, name in zip(shares, new_names, strict=True):
        known = [name] if name in names else [part for part in name.split("+") if part in names]
        for part in known or ["none"]:
            row[names.index(part)] = 1 / len(known or ["none"])
    return shares


if __name__ == "__main__":
    main(tyro.cli(Options))
