"""How many frames does a world have to remember? Drift, likeness and speed of k=1 by that number.

Dreams of recorded held-out clips (see `runs.acceptance`), whose context is 4 frames. What a shorter
context costs in likelihood is in docs/results/world/acceptance.md.

    runs/doom_data.sh work/doom                 # or its held-out clips alone
    python -m runs.remember --data work/doom --out docs/results/world/remember.json
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import tyro

from diagd.backends.names import DTypeName
from diagd.console import make_console, print_records
from diagd.files import write_json
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from runs import acceptance

HORIZONS = 1, 8, 16


@dataclass(frozen=True)
class Options:
    """Dream with several sizes of context."""

    data: Path  # folder with heldout_SCENARIO
    out: Path = Path("remember.json")
    model: str = "doom"
    remember: tuple[int, ...] = (8, 5)
    num_clips: int = 10  # of each scenario
    frames: int = 64  # of a clip, four given ones included
    dtype: DTypeName = "int8"  # of the weights


@torch.inference_mode()
def measure(options: Options, scenario: str) -> list[dict[str, Any]]:
    """Dream all clips of a scenario under each number, one after the other."""
    world = VideoGenerator.from_pretrained(options.model, dtype=options.dtype)
    asked = acceptance.Options(options.data, num_clips=options.num_clips, frames=options.frames)
    clips = acceptance.read(world, asked, scenario)
    given = clips.context_frames
    truth, future = clips.videos[:, given:], clips.actions[:, given:]
    rows = []
    for count in options.remember:
        world.remembers = count
        started = time.perf_counter()
        tokens = clips.dream("k=1", future)
        seconds = time.perf_counter() - started
        dreamt = clips.paint(tokens)
        distances = acceptance.drift(clips, dreamt, truth)
        likeness = psnr(dreamt, truth)
        row = {
            "scenario": scenario,
            "remember": count,
            "frames_per_second": tokens.shape[0] * tokens.shape[1] / seconds,
            "tfd": distances,
            "psnr": likeness.mean(0).tolist(),
        }
        rows.append(row)
    return rows


def main(options: Options) -> None:
    """Measure every scenario, and print means over them."""
    scenarios = sorted(folder.name[8:] for folder in options.data.glob("heldout_*"))
    found = [row for scenario in scenarios for row in measure(options, scenario)]
    rows = [
        {
            "remember": count,
            "fps": median(one["frames_per_second"] for one in of),
            "first": np.mean([one["tfd"][0] for one in of]),
            "last": np.mean([one["tfd"][-1] for one in of]),
            **{f"psnr{n}": np.mean([one["psnr"][n - 1] for one in of]) for n in HORIZONS},
        }
        for count in options.remember
        for of in [[one for one in found if one["remember"] == count]]
    ]
    columns = {
        "remember": "{remember}",
        "frames/s": "{fps:.2f}",
        "TFD first 8": "{first:.1f}",
        "TFD last 8": "{last:.1f}",
        **{f"PSNR {n}": f"{{psnr{n}:.2f}}" for n in HORIZONS},
    }
    print_records(make_console(), f"{options.model}, k=1", columns, rows)
    document = {"options": asdict(options), "rows": found, **provenance(torch.device("cpu"))}
    write_json(options.out, document, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
