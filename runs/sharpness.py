"""How sharp does a tokenizer paint, and what does that cost? Tokenizers that share their tokens.

    python -m runs.sharpness --data work/doom --out docs/results/world/sharpness.json \\
        --tokenizers before=OLD after=diagd/assets/doom/tokenizer

Held-out clips and the world's dreams of them, k=1, are painted by each. Sharpness (the variance of
the Laplacian) is a share of the true pictures'; PSNR of dreams is above that of a copy of the last
given frame, in clips that move. The picture has a row for the truth and one for each tokenizer: a
frame as it is coded, then the dreamt frames 1 and 8.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from diagd.console import make_console, print_records
from diagd.data.video import contact_sheet
from diagd.files import write_json
from diagd.metrics.quality import psnr, sharpness
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from diagd.tokenizers.vq import VQTokenizer
from runs import acceptance
from runs.acceptance_table import STILL_DB

SHOWN = 2  # clips of each scenario in the picture
HORIZONS = 1, 8


@dataclass(frozen=True)
class Options:
    """Compare tokenizers that share their tokens."""

    data: Path  # folder with heldout_SCENARIO
    tokenizers: tuple[str, ...]  # LABEL=FOLDER
    out: Path = Path("sharpness.json")  # the picture stands beside it, as webp
    model: str = "doom"
    num_clips: int = 16  # of each scenario


def share(pictures: Tensor, truth: Tensor) -> float:
    """Return the sharpness of pictures (..., H_px, W_px, 3) as a share of the true one."""
    ours, theirs = (sharpness(one.reshape(-1, *one.shape[-3:])) for one in (pictures, truth))
    return (ours / theirs).median().item()


@torch.inference_mode()
def main(options: Options) -> None:
    """Dream once, and paint with each."""
    world = VideoGenerator.from_pretrained(options.model, dtype="float32")
    painters = {
        label: VQTokenizer.from_pretrained(folder)
        for label, _, folder in (one.partition("=") for one in options.tokenizers)
    }
    rows, shown = [], []
    for scenario in sorted(folder.name[8:] for folder in options.data.glob("heldout_*")):
        asked = acceptance.Options(options.data, num_clips=options.num_clips)
        clips = acceptance.read(world, asked, scenario)
        given, end = clips.context_frames, clips.context_frames + max(HORIZONS)
        truth, coded = clips.videos[:, given:end], clips.tokens[:, given:end]
        dreamt = clips.dream("k=1", clips.actions[:, given:end])
        copies = psnr(clips.last[:, None].expand_as(truth), truth)
        moves = copies.mean(1) < STILL_DB
        shown.append(truth[:SHOWN, [0, 0, -1]].flatten(0, 1))
        for label, painter in painters.items():
            pictures, dreams = (
                torch.stack([painter.decode(clip) for clip in tokens]) for tokens in (coded, dreamt)
            )
            above = psnr(dreams, truth) - copies
            row: dict[str, Any] = {
                "scenario": scenario,
                "tokenizer": label,
                "psnr": psnr(pictures, truth).mean().item(),
                "sharpness": share(pictures, truth),
                "moving": int(moves.sum()),
            }
            for frame in HORIZONS:
                row[f"above{frame}"] = above[moves, frame - 1].mean().item()
                row[f"sharpness{frame}"] = share(dreams[:, frame - 1], truth[:, frame - 1])
            rows.append(row)
            sheet = torch.cat([pictures[:SHOWN, :1], dreams[:SHOWN, [0, -1]]], 1)
            shown.append(sheet.flatten(0, 1))
    columns = {
        "place": "{scenario}",
        "tokenizer": "{tokenizer}",
        "PSNR": "{psnr:.1f}",
        "sharp": "{sharpness:.0%}",
        **{f"dreamt {n}": f"{{above{n}:+.1f}} dB {{sharpness{n}:.0%}}" for n in HORIZONS},
    }
    print_records(make_console(), "held-out clips, and dreams of them", columns, rows)
    acceptance.write_webp(
        options.out.with_suffix(".webp"), contact_sheet(torch.cat(shown), 3 * SHOWN)
    )
    document = {"options": asdict(options), "rows": rows, **provenance(torch.device("cpu"))}
    write_json(options.out, document, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
