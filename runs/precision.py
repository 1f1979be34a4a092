"""Measure what bfloat16 and int8 weights cost: teacher-forced loss of the bundled model.

python runs/precision.py --tokens work/doom/tokens/heldout --out docs/results
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from diagd.backends.native.model import NativeModel
from diagd.families.checkpoints import load_model
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import draw_batch

FRAMES = 8


@dataclass(frozen=True)
class Options:
    """Measure on token shards of held-out clips."""

    tokens: Path  # folder of token shards
    out: Path  # folder for precision.json
    model: str = "doom"
    windows: int = 16  # windows of 8 frames


@torch.inference_mode()
def main(options: Options) -> None:
    """Write precision.json: nats a visual token, and how often the likeliest token changes."""
    model, clips = load_model(options.model), read_shards(options.tokens)
    tokens = draw_batch(clips, FRAMES, options.windows, seed=0)
    codes = clips.codebook_size
    report: dict[str, dict[str, float]] = {}
    likeliest: Tensor | None = None
    for weights in track(("float32", "bfloat16", "int8"), description="loss"):
        native = NativeModel(model, weights)
        logits = torch.cat([causal(native, window[None]) for window in tokens])[..., :codes]
        targets = tokens[:, 1:]
        visual = targets < codes
        best = logits.argmax(-1)[visual]
        likeliest = best if likeliest is None else likeliest
        report[weights] = {
            "loss": functional.cross_entropy(logits[visual], targets[visual]).item(),
            "likeliest_token_unchanged": (best == likeliest).float().mean().item(),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "precision.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(report, indent=1))


def causal(model: NativeModel, tokens: Tensor) -> Tensor:
    """Return the logits of all but the last token."""
    slots = torch.arange(tokens.shape[1] - 1)
    visible = torch.ones(len(slots), len(slots), dtype=torch.bool).tril()
    return model.forward(tokens[:, :-1], slots, slots, visible, model.make_cache(1, len(slots) + 1))


if __name__ == "__main__":
    main(tyro.cli(Options))
