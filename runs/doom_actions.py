"""Measure whether the bundled model listens: loss with true and false actions, and when still.

python runs/doom_actions.py --tokens work/doom/tokens/heldout --out docs/results
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn import functional

from diagd.families.checkpoints import load_model
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import read_shards
from diagd.training.sequences import draw_batch

FRAMES = 8


@dataclass(frozen=True)
class Options:
    """Measure on token shards of held-out clips."""

    tokens: Path  # folder of token shards
    out: Path  # folder for doom_actions.json
    model: str = "doom"
    windows: int = 16  # windows of 8 frames


def main(options: Options) -> None:
    """Write doom_actions.json, in nats a visual token."""
    model, clips = load_model(options.model), read_shards(options.tokens)
    names, codes = clips.action_names, clips.codebook_size
    tokens = draw_batch(clips, FRAMES, options.windows, seed=0)
    is_action = tokens >= codes
    swap = {"left": "right", "forward+left": "forward+right"}
    swap |= {right: left for left, right in swap.items()}
    swapped = tokens.clone()
    for name, other in swap.items():
        swapped[tokens == codes + names.index(name)] = codes + names.index(other)
    report: dict[str, object] = {"loss_by_frame_true_actions": losses(model, tokens)}
    given = {"true": tokens, "left and right swapped": swapped}
    for name in ("none", "forward", "left", "right"):
        given[f"all {name}"] = tokens.masked_fill(is_action, codes + names.index(name))
    report["loss_with_actions"] = {
        name: sum(losses(model, sequence)[1:]) / (FRAMES - 1) for name, sequence in given.items()
    }
    frame = clips.tokens[: options.windows, 20].flatten(1).long()
    stand = torch.full((len(frame), 1), codes + names.index("none"))
    still = torch.cat([frame, *[stand, frame] * (FRAMES - 1)], dim=1)
    report["loss_by_frame_of_a_still_video"] = losses(model, still)
    write_json(options.out / "doom_actions.json", report, indent=1)
    print(json.dumps(report, indent=1))


@torch.inference_mode()
def losses(model: Transformer, tokens: Tensor) -> list[float]:
    """Mean loss of the visual tokens of each frame."""
    logits, targets = model.logits(tokens[:, :-1]), tokens[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    visual = functional.pad(loss.view(targets.shape), (2, 0)).unflatten(1, (FRAMES, -1))[..., 1:]
    counts = torch.full((FRAMES,), visual.shape[2])
    counts[0] -= 1  # nothing predicts the very first token
    return (visual.sum(dim=(0, 2)) / (len(tokens) * counts)).tolist()


if __name__ == "__main__":
    main(tyro.cli(Options))
