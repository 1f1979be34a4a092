"""Repaint recorded clips, so that a world learns that places may look otherwise.

    python -m runs.repaint --clips work/doom/train --out work/doom/repainted --count 240

Every clip has other colours, from its first frame to its last: the hue is turned, saturation,
brightness and contrast change; half of them are flat as a drawing, too. The actions stay. Goes on
where it was killed.
"""

import hashlib
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image, ImageFilter
from rich.progress import track
from torch import Tensor

from diagd.data.video import encode_video, read_video
from diagd.families.clip_files import find_films
from diagd.files import write_bytes

LUMA = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])  # YIQ


@dataclass(frozen=True)
class Options:
    """Repaint clips that are spread evenly over a folder."""

    clips: Path
    out: Path
    count: int = 240


def main(options: Options) -> None:
    """Write the clips, and actions and their names beside them."""
    paths = find_films(options.clips)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in track(paths[:: max(1, len(paths) // options.count)][: options.count]):
        target = options.out / f"repainted_{path.name}"
        if target.exists():
            continue
        video = read_video(path)
        seed = int.from_bytes(hashlib.sha256(path.stem.encode()).digest()[:4])
        shutil.copy(path.with_suffix(".jsonl"), target.with_suffix(".jsonl"))
        write_bytes(target, encode_video(repaint(video.frames, seed), video.fps))
    shutil.copy(options.clips / "actions.json", options.out)


def repaint(frames: Tensor, seed: int) -> Tensor:
    """Return frames (T, H_px, W_px, 3) uint8 in colours that the seed chooses."""
    random = np.random.default_rng(seed)
    if random.random() < 0.5:  # patches of one colour, as in a drawing
        size, bits = int(random.choice([5, 7, 9])), int(random.integers(3, 6))
        step = 256 >> bits
        flat = [
            np.asarray(Image.fromarray(frame.numpy()).filter(ImageFilter.MedianFilter(size)))
            for frame in frames
        ]
        frames = torch.from_numpy(np.stack(flat) // step * step + step // 2)
    angle = random.uniform(-math.pi, math.pi)
    saturation, gamma, contrast = (math.exp(random.uniform(-0.6, 0.6)) for _ in range(3))
    turned = torch.eye(3)
    turned[1:, 1:] = saturation * torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    colours = frames / 255 @ (LUMA.inverse() @ turned @ LUMA).T
    bright = colours.clamp(0, 1) ** gamma
    middle = bright.mean()
    return (((bright - middle) * contrast + middle).clamp(0, 1) * 255).round().byte()


if __name__ == "__main__":
    main(tyro.cli(Options))
