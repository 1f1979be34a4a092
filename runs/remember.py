"""How many frames does a world have to remember? Drift, likeness and speed of k=1 by that number.

Dreams of recorded held-out clips (see `runs.acceptance`), whose context is 4 frames. What a shorter
context costs in likelihood is in docs/results/world/acceptance.md.

    for scenario in maze defend_the_line health_gathering_supreme deathmatch; do
      diagd record --scenario $scenario --out work/doom/heldout_$scenario --clips 16 --first-seed ...
    done                                                       # the seeds of runs/doom_data.sh
    python -m runs.remember --data work/doom --out docs/results/world/remember.json
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import tyro

from diagd.console import make_console, print_records
from diagd.files import write_json
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from runs import acceptance


@dataclass(frozen=True)
class Options:
    """Dream with several sizes of context."""

    data: Path  # folder with heldout_SCENARIO
    out: Path = Path("remember.json")
    model: str = "doom"
    remember: tuple[int, ...] = (8, 6, 5)
    num_clips: int = 16
    frames: int = 64  # of a clip, four given ones included
    dtype: str = "int8"  # of the weights


def measure(options: Options, scenario: str) -> Iterator[dict[str, Any]]:
    """Dream all clips of a scenario under each number, and then under the next."""
    world = VideoGenerator.from_pretrained(options.model, dtype=options.dtype)  # pyright: ignore[reportArgumentType]
    asked = acceptance.Options(options.data, num_clips=options.num_clips, frames=options.frames)
    clips = acceptance.read(world, asked, scenario)
    given = clips.context_frames
    truth, future = clips.videos[:, given:], clips.actions[:, given:]
    for count in options.remember:
        world.remembers = count
        started = time.perf_counter()
        tokens = clips.dream("k=1", future)
        seconds = time.perf_counter() - started
        dreamt = clips.paint(tokens)
        distances = acceptance.drift(clips, dreamt, truth)
        likeness = psnr(dreamt, truth)
        yield {
            "scenario": scenario,
            "remember": count,
            "frames_per_second": tokens.shape[0] * tokens.shape[1] / seconds,
            "tfd": distances,
            "psnr": likeness.mean(0).tolist(),
        }


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
            **{f"psnr{n}": np.mean([one["psnr"][n - 1] for one in of]) for n in (1, 8, 32)},
        }
        for count in options.remember
        for of in [[one for one in found if one["remember"] == count]]
    ]
    columns = {
        "remember": "{remember}",
        "frames/s": "{fps:.2f}",
        "TFD 1-8": "{first:.1f}",
        "TFD 53-60": "{last:.1f}",
        "PSNR 1": "{psnr1:.2f}",
        "PSNR 8": "{psnr8:.2f}",
        "PSNR 32": "{psnr32:.2f}",
    }
    print_records(make_console(), f"{options.model}, k=1", columns, rows)
    document = {"options": asdict(options), "rows": found, **provenance(torch.device("cpu"))}
    write_json(options.out, document, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
