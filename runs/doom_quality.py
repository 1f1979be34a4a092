"""Measure the bundled world model on held-out episodes, and draw what it shows.

Quality per horizon of raster and diagonals beside the tokenizer's own reconstruction and copying
the last context frame; the share of sampled tokens that diagonals have in common with raster; and
whether left and right turn the view to opposite sides. Needs `pip install -e '.[metrics]'`.

    python -m runs.doom_quality --clips work/doom/heldout --out docs/results
"""

import json
import platform
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import tyro

from diagd.data.actions import read_actions
from diagd.data.video import contact_sheet, read_video, write_image
from diagd.families.defaults import GenerationDefaults
from diagd.files import write_json
from diagd.metrics.quality import psnr, ssim
from diagd.pipeline.generator import VideoGenerator
from diagd.reporting.pictures import save_figure
from runs.acceptance import Clips, ids_of, turns

STRATEGIES = ("raster", "k=4", "k=2", "k=1")
HORIZON = 8
TURN_FRAMES = 4


@dataclass(frozen=True)
class Options:
    """Evaluate a world model on recorded clips it was not trained on."""

    clips: Path  # folder of clip_*.mp4 and clip_*.jsonl
    out: Path  # folder for doom.json and pictures
    model: str = "doom"
    num_clips: int = 64
    context_frames: int = 4
    batch_size: int = 16
    seed: int = 0


def main(options: Options) -> None:
    """Run everything and write doom.json, doom_quality.png, doom_turns.png, doom_dreams.png."""
    world = VideoGenerator.from_pretrained(options.model)
    assert world.vocabulary is not None
    paths = sorted(options.clips.glob("clip_*.mp4"))[: options.num_clips]
    given = options.context_frames
    length = given + HORIZON
    videos = torch.stack([read_video(path, length).frames for path in paths])
    taken = [read_actions(path.with_suffix(".jsonl"), world.vocabulary)[:length] for path in paths]
    tokens = torch.stack([world.tokenizer.encode(video) for video in videos])
    numbers = given, options.batch_size, options.seed
    clips = Clips(world, videos, tokens, ids_of(world, taken), *numbers)
    truth = videos[:, given:]
    dreams = {name: clips.dream(name, clips.actions[:, given:]) for name in STRATEGIES}
    rows = {
        "tokenizer reconstruction": clips.paint(tokens[:, given:]),
        **{name: clips.paint(dream) for name, dream in dreams.items()},
        "copy of the last context frame": clips.last[:, None].expand_as(truth),
    }
    quality = {
        name: {
            "psnr": psnr(video, truth).mean(0).tolist(),
            "ssim": ssim(video, truth).mean(0).tolist(),
        }
        for name, video in rows.items()
    }
    agreement = {
        name: {
            "all frames": (dream == dreams["raster"]).float().mean().item(),
            "first frame": (dream == dreams["raster"])[:, 0].float().mean().item(),
        }
        for name, dream in dreams.items()
        if name != "raster"
    }
    shifts = turns(clips, options.out / "doom_turns.png")
    left, right = (torch.tensor(shifts[name]).float() for name in ("left", "right"))
    turning = {
        "left_shift_px_median": left.median().item(),
        "right_shift_px_median": right.median().item(),
        "clips_turning_opposite_ways": ((left > 0) & (right < 0)).float().mean().item(),
    }
    report = {
        "model": options.model,
        "clips": len(paths),
        "context_frames": options.context_frames,
        "sampling": {
            "temperature": GenerationDefaults.temperature,
            "top_p": GenerationDefaults.top_p,
        },
        "seed": options.seed,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "quality_by_horizon": quality,
        "tokens_equal_to_raster": agreement,
        "turning": turning,
    }
    write_json(options.out / "doom.json", report, indent=1)
    plot(quality, options.out / "doom_quality.png")
    chosen = torch.cat([truth[:3], *(rows[name][:3] for name in ("raster", "k=2", "k=1"))], 1)
    write_image(options.out / "doom_dreams.png", contact_sheet(chosen.flatten(0, 1), HORIZON))
    for name, values in quality.items():
        print(f"{name:32s} PSNR", *(f"{value:5.2f}" for value in values["psnr"]))
        print(f"{'':32s} SSIM", *(f"{value:5.3f}" for value in values["ssim"]))
    print("tokens equal to raster:", json.dumps(agreement))
    print("turning:", json.dumps(turning))


def plot(quality: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw PSNR and SSIM against the horizon."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, values in quality.items():
        for axis, metric in zip(axes, ("psnr", "ssim"), strict=True):
            axis.plot(range(1, HORIZON + 1), values[metric], marker="o", label=name)
    for axis, label in zip(axes, ("PSNR, dB", "SSIM"), strict=True):
        axis.set(xlabel="frames after the context", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Options))
