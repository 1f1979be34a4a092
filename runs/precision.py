"""Measure what rounding costs: teacher-forced loss and logits of the maze world by weights.

python runs/precision.py --tokens work/maze/tokens/heldout --out docs/results
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import tyro
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from diagd.backends.linears import round_linears
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.decoding.visibility import Seen
from diagd.families.checkpoints import load_model
from diagd.files import write_json
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import draw_batch

FRAMES = 8


@dataclass(frozen=True)
class Options:
    """Measure on token shards of held-out clips."""

    tokens: Path  # folder of token shards
    out: Path  # folder for precision.json
    model: str = "maze"
    windows: int = 16  # windows of 8 frames


@torch.inference_mode()
def main(options: Options) -> None:
    """Write precision.json: nats a visual token, changed likeliest tokens, errors of the logits."""
    model, clips = load_model(options.model), read_shards(options.tokens)
    tokens = draw_batch(clips, FRAMES, options.windows, seed=0)
    codes = clips.codebook_size
    targets = tokens[:, 1:]
    visual = targets < codes
    natives = {weights: NativeModel(model, weights) for weights in get_args(NativeDType)}
    plain = copy.deepcopy(model)
    dense = {
        "float64": model.double(),  # the truth: it comes first
        "pytorch float32": plain,
        "pytorch bfloat16": copy.deepcopy(plain).bfloat16(),
        "pytorch int8": round_linears(copy.deepcopy(plain), torch.bfloat16),  # as on CUDA
    }
    report: dict[str, dict[str, float]] = {}
    truth: Tensor | None = None
    for name in track((*dense, *natives), description="loss"):
        if name in natives:
            parts = [causal(natives[name], window[None]) for window in tokens]
        else:
            parts = [dense[name].logits(window[None])[:, :-1] for window in tokens]
        logits = torch.cat(parts)[visual][..., :codes].double()
        truth = logits if truth is None else truth
        report[name] = {
            "loss": functional.cross_entropy(logits, targets[visual]).item(),
            "likeliest_token_unchanged": (logits.argmax(-1) == truth.argmax(-1))
            .double()
            .mean()
            .item(),
            "logits_error": ((logits - truth).square().mean().sqrt() / truth.std()).item(),
        }
    write_json(options.out / "precision.json", report, indent=1)
    print(json.dumps(report, indent=1))


def causal(model: NativeModel, tokens: Tensor) -> Tensor:
    """Return the logits of all but the last token."""
    slots = torch.arange(tokens.shape[1] - 1)
    cache, seen = model.make_cache(1, len(slots) + 1), Seen(slots, slots, slots, slots)
    return model.forward(tokens[:, :-1], slots, slots, seen, cache)


if __name__ == "__main__":
    main(tyro.cli(Options))
