"""Control for runs/attention.sh: the same numbers before training, with and without aimed heads.

The maze world's first layers are initialised to attend to neighbours (training/setup.py), so part
of what `diagd attention` shows was put there. Sequences are of random tokens: an untrained
model knows no others.

python runs/attention_start.py --out work/attention_start.json
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from diagd.evaluation.attention import measure_attention
from diagd.families.checkpoints import load_model
from diagd.files import write_json
from diagd.models.transformer import Transformer
from diagd.training.setup import aim_heads


@dataclass(frozen=True)
class Options:
    """Measure untrained models of the maze world's shape."""

    out: Path
    model: str = "maze"
    clips: int = 4


def main(options: Options) -> None:
    """Write the shares of both starts, all layers and by layer."""
    config = load_model(options.model).config
    size = config.grid_height, config.grid_width
    length = 2 * config.tokens_per_frame + config.num_action_tokens
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.image_vocab_size, (options.clips, length), generator=generator)
    report = {}
    for name, start in (("random", lambda model: model), ("aimed heads", aim_heads)):
        model = start(Transformer.random(config)).eval()
        found = measure_attention(model, tokens, *size, num_action_tokens=config.num_action_tokens)
        numbers = found.report()
        layers = [layer["shares"] for layer in numbers["layers"]]
        report[name] = {"shares": numbers["shares"], "layers": layers}
    write_json(options.out, report, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
