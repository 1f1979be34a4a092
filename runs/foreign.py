"""What becomes of pictures unlike all that a world has seen? Drawn places, dreamt of for 8 frames.

    python -m runs.foreign --models before=OLD after=doom --out docs/results/world/foreign.json

Nobody moves, so floor, walls and sky should stay. A patch is kept where its colour is still nearer
to that of its own region in the drawing than to those of the others: a third are so by chance. The
picture has a row for each drawing and model: the drawing, then dreamt frames 1, 2, 4 and 8.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw
from torch import Tensor

from diagd.console import make_console, print_records
from diagd.data.video import contact_sheet
from diagd.files import write_json
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from runs.acceptance import write_webp

PATCH_PX = 16
SCALE = 4  # drawings are made larger, so that edges are smooth
FRAMES, SHOWN = 8, (0, 1, 3, 7)


class Place(NamedTuple):
    """A drawing: colours of its three regions, where they meet, and what stands in it."""

    floor: tuple[int, int, int]
    walls: tuple[int, int, int]
    sky: tuple[int, int, int]
    horizon: float = 0.5  # of the far end, as shares of the picture
    end: float = 0.2  # half its width
    things: tuple[tuple[float, float, float, float, tuple[int, int, int]], ...] = ()
    grain: float = 0.0  # of paper: standard deviation, in levels


LAMP = 230, 200, 90
PLACES = {
    "corridor": Place((70, 110, 70), (150, 120, 90), (120, 170, 230)),
    "night": Place((40, 40, 60), (80, 70, 110), (10, 10, 30), 0.6, 0.3,
                   ((0.05, 0.3, 0.1, 0.4, LAMP), (0.85, 0.25, 0.92, 0.4, LAMP))),
    "desert": Place((220, 180, 110), (190, 120, 70), (140, 190, 240), 0.55, 0.35, grain=6),
    "snow": Place((235, 235, 245), (110, 120, 140), (170, 190, 215), 0.45, 0.25,
                  ((0.45, 0.3, 0.55, 0.5, (60, 80, 60)),), grain=4),
    "brick": Place((90, 80, 75), (150, 60, 50), (60, 60, 65), 0.5, 0.12, grain=10),
    "street": Place((90, 90, 95), (180, 170, 150), (150, 190, 235), 0.5, 0.15,
                    ((0.1, 0.3, 0.2, 0.7, (70, 50, 40)), (0.75, 0.35, 0.82, 0.65, (70, 50, 40)))),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Dream of drawings."""

    models: tuple[str, ...] = ("doom=doom",)  # LABEL=FOLDER
    out: Path = Path("foreign.json")  # the picture stands beside it, as webp
    seeds: int = 4


def draw(place: Place, height_px: int, width_px: int) -> tuple[Tensor, Tensor]:
    """Return a drawing (H_px, W_px, 3) uint8, and its regions (H_px, W_px).

    They are 0 floor, 1 walls, 2 sky.
    """
    height, width = height_px * SCALE, width_px * SCALE
    left, right = ((0.5 + side * place.end) * width for side in (-1, 1))
    top, bottom = ((place.horizon + side * place.end / 2) * height for side in (-1, 1))
    regions = Image.new("L", (width, height), 1)
    pen = ImageDraw.Draw(regions)
    pen.polygon([(0, height), (left, bottom), (right, bottom), (width, height)], 0)
    pen.polygon([(0, 0), (left, top), (right, top), (width, 0)], 2)
    where = np.asarray(regions)
    picture = Image.fromarray(np.array(place[:3], np.uint8)[where])
    pen = ImageDraw.Draw(picture)
    for x, y, x_end, y_end, colour in place.things:
        pen.rectangle((x * width, y * height, x_end * width, y_end * height), colour)
    small = np.asarray(picture.resize((width_px, height_px), Image.Resampling.LANCZOS), np.float32)
    small = small + np.random.default_rng(0).normal(0, place.grain, (*small.shape[:2], 1))
    drawn = torch.from_numpy(small.clip(0, 255).astype(np.uint8))
    return drawn, torch.from_numpy(where[SCALE // 2 :: SCALE, SCALE // 2 :: SCALE].copy())


def patches(pictures: Tensor) -> Tensor:
    """Return mean colours: (T, H_px, W_px, 3) to (T, N, 3) float32."""
    mean = torch.nn.functional.avg_pool2d(pictures.float().movedim(-1, 1), PATCH_PX)
    return mean.flatten(2).mT


def kept(drawing: Tensor, regions: Tensor, frames: Tensor) -> list[float]:
    """Return the share of patches inside one region that are still like it, for each frame."""
    parts = torch.nn.functional.one_hot(regions.long(), 3)
    shares = patches(parts[None])[0]
    pure, region = shares.max(1)
    inside = pure > 0.99
    colours = patches(drawing[None])[0]
    means = torch.stack([colours[inside & (region == number)].mean(0) for number in range(3)])
    nearest = torch.cdist(patches(frames), means).argmin(-1)
    return (nearest == region)[:, inside].float().mean(1).tolist()


def measure(model: str, options: Options) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield a row for each place, and what to show of it."""
    label, _, folder = model.partition("=")
    world = VideoGenerator.from_pretrained(folder, dtype="float32")
    for name, place in PLACES.items():
        drawing, regions = draw(place, *world.frame_size_px)
        coded = world.tokenizer.decode(world.tokenizer.encode(drawing[None]))
        dreams = [
            world.generate(drawing, "none", FRAMES, seed=seed).frames
            for seed in range(options.seeds)
        ]
        shares = np.mean([kept(drawing, regions, dream) for dream in dreams], axis=0)
        row = {
            "model": label,
            "place": name,
            "tokenizer_psnr": psnr(coded, drawing[None]).item(),
            "kept_by_tokenizer": kept(drawing, regions, coded)[0],
            "kept": shares.tolist(),
        }
        yield row, torch.cat([drawing[None], dreams[0][list(SHOWN)]])


@torch.inference_mode()
def main(options: Options) -> None:
    """Write the numbers and the picture."""
    found = [list(measure(model, options)) for model in options.models]
    rows = [row for of_model in found for row, _ in of_model]
    asked = asdict(options) | {"out": str(options.out)}
    write_json(options.out, {"options": asked, **provenance(torch.device("cpu")), "rows": rows})
    shown = [picture for of_place in zip(*found, strict=True) for _, picture in of_place]
    sheet = contact_sheet(torch.cat(shown), 1 + len(SHOWN))
    write_webp(options.out.with_suffix(".webp"), sheet)
    columns = {"model": "{model}", "place": "{place}", "coded": "{kept_by_tokenizer:.0%}"}
    columns |= {"first frame": "{kept[0]:.0%}", "last frame": "{kept[7]:.0%}"}
    print_records(make_console(), "patches like the drawing", columns, rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
