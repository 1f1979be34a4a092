"""How far our diagonals are from MineWorld's own, on its tiny fixture, and where they part.

python runs/mineworld_agreement.py --out work
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from safetensors.torch import load_file

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import FrameFormat, TokenGrid
from diagd.decoding.strategies.table import Diagonal
from diagd.families.checkpoints import load_model
from diagd.files import write_json

FIXTURE = Path(__file__).parent.parent / "tests" / "fixtures" / "mineworld_tiny"
GRID = TokenGrid(3, 4, 6)


@dataclass(frozen=True)
class Options:
    """Where to write mineworld_agreement.json."""

    out: Path


def main(options: Options) -> None:
    """Compare tokens of the small case, greedy: 3 frames of 4 x 6 after one."""
    model = load_model(FIXTURE)
    data = load_file(FIXTURE / "golden.safetensors")
    actions = data["small.actions"].transpose(0, 1)
    report = {}
    for k in (1, 2, 3, 4, 5):
        for row_start, suffix in (("predecessor", ""), ("spatial", "_prev")):
            engine = DecodingEngine(
                model,
                FrameFormat(GRID.height, GRID.width, actions.shape[2]),
                sampling=SamplingOptions(valid_range=(0, model.config.image_vocab_size)),
            )
            engine.prefill(data["small.prompt_ids"], 1)
            frames = list(engine.decode(Diagonal(k, row_start=row_start), actions))
            theirs = data[f"small.image_k{k}{suffix}.tokens"].view(GRID.num_frames, -1)
            equal = [ours.flatten() == their for ours, their in zip(frames, theirs, strict=True)]
            first = int((~equal[0]).nonzero()[0])
            report[f"k={k}, {row_start}"] = {
                "equal": sum(int(row.sum()) for row in equal) / theirs.numel(),
                "first_difference": {"row": first // GRID.width, "column": first % GRID.width},
            }
    for name, row in report.items():
        print(name, row)
    write_json(options.out / "mineworld_agreement.json", report, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
