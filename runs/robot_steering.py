"""Does a robot's world obey? Dreams under true and opposite actions, for docs/your-own-robot.md.

    python -m runs.robot_steering --world work/robot/world --clips work/robot/tokens/clips

The world goes on from the middle of episodes that it was not trained on, with the numbers that the
robot then got, and with their negatives. A world that is steered comes closer to what happened with
the first, and closer than the last frame held still; one that only makes likely films does not.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from diagd.data.actions import read_actions
from diagd.data.vectors import VectorActions
from diagd.data.video import contact_sheet, read_video, write_image
from diagd.files import write_json
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance, settings_of
from diagd.training.corpus import split_clips

SIGNS = {"true": 1, "opposite": -1}
SHOWN = 3  # episodes of the picture, each in rows: what happened, dreams by true actions, opposite
EVERY = 2  # frames of the picture


@dataclass(frozen=True)
class Options:
    """Measure whether a robot's world obeys its actions."""

    world: Path
    clips: Path  # as `diagd tokenize --lerobot` leaves them; every tenth is held out
    out: Path = Path("steering.json")
    picture: Path = Path("steering.png")
    start: int = 16  # frame from which the world goes on
    frames: int = 16
    strategies: tuple[str, ...] = ("raster", "k=1")
    seed: int = 0


def dream(
    world: VideoGenerator, clip: Path, options: Options
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the PSNR (T,) of each way to go on with a clip, and pictures (T, H_px, W_px, 3)."""
    codec, start, count = world.vocabulary, options.start, options.frames
    assert isinstance(codec, VectorActions)
    video = read_video(clip, start + count).frames
    names = read_actions(clip.with_suffix(".jsonl"), codec)
    numbers = np.array([codec.numbers_of(name) for name in names])
    given = slice(start - world.defaults.context_frames, start)
    truth, led = video[start:], numbers[start : start + count]
    pictures = {
        "what happened": truth,
        "tokenizer": world.tokenizer.decode(world.tokenizer.encode(truth)),
        "last frame": video[start - 1 : start].expand_as(truth),
    }
    for strategy, (way, sign) in product(options.strategies, SIGNS.items()):
        pictures[f"{strategy}, {way}"] = world.generate(
            video[given],
            sign * led,
            strategy=strategy,
            context_actions=numbers[given][1:],
            seed=options.seed,
        ).frames
    return {name: psnr(one, truth) for name, one in pictures.items() if one is not truth}, pictures


def summary(values: Tensor, held: Tensor) -> dict[str, Any]:
    """Summarize PSNR (episodes, T), also beside that of the last frame held still."""
    means = values.mean(1)
    return {
        "psnr": means.mean().item(),
        "standard_error": (means.std(correction=0) / len(means) ** 0.5).item(),
        "by_frame": values.mean(0).tolist(),
        "episodes_above_last_frame": (means > held.mean(1)).double().mean().item(),
    }


def main(options: Options) -> None:
    """Dream the held-out episodes, and write the numbers and a picture of some."""
    world = VideoGenerator.from_pretrained(options.world)
    _, heldout = split_clips(sorted(options.clips.glob("*.mp4")), 0.1)
    found, rows = defaultdict[str, list[Tensor]](list), list[Tensor]()
    for clip in heldout:
        likeness, pictures = dream(world, clip, options)
        for name, one in likeness.items():
            found[name].append(one)
        names = "what happened", *(f"{options.strategies[0]}, {way}" for way in SIGNS)
        rows += [pictures[name][EVERY - 1 :: EVERY] for name in names]
    table = {name: torch.stack(values) for name, values in found.items()}
    result: dict[str, Any] = {"provenance": provenance(world.model.device)}
    result |= {"settings": settings_of(options), "episodes": len(heldout)}
    result["ways"] = {name: summary(values, table["last frame"]) for name, values in table.items()}
    result["true_above_opposite"] = {
        one: (table[f"{one}, true"].mean(1) > table[f"{one}, opposite"].mean(1))
        .double()
        .mean()
        .item()
        for one in options.strategies
    }
    write_json(options.out, result, indent=2)
    sheet = torch.cat(rows[: SHOWN * (1 + len(SIGNS))])
    twice = sheet.repeat_interleave(2, 1).repeat_interleave(2, 2)
    write_image(options.picture, contact_sheet(twice, options.frames // EVERY))
    for name, one in result["ways"].items():
        print(f"{name:18} {one['psnr']:.2f} +- {one['standard_error']:.2f} dB")


if __name__ == "__main__":
    main(tyro.cli(Options))
