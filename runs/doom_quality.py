"""Measure the bundled world model on held-out episodes, and draw what it shows.

Quality per horizon of raster and diagonals beside the tokenizer's own reconstruction and copying
the last context frame; the share of sampled tokens that diagonals have in common with raster; and
whether left and right turn the view to opposite sides. Needs `pip install 'diagd[metrics]'`.

    python runs/doom_quality.py --clips work/doom/heldout --out docs/results
"""

import json
import platform
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import tyro
from rich.progress import track
from torch import Tensor

from diagd.data.actions import read_actions
from diagd.data.video import contact_sheet, read_video, write_image
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.families.defaults import GenerationDefaults
from diagd.metrics.quality import psnr, ssim
from diagd.pipeline.generator import VideoGenerator

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
    length = options.context_frames + HORIZON
    videos = torch.stack([read_video(path, length).frames for path in paths])
    taken = [read_actions(path.with_suffix(".jsonl"), world.vocabulary)[:length] for path in paths]
    actions = torch.tensor([[world.vocabulary.tokens_of(a)[0] for a in row] for row in taken])
    tokens = torch.stack([world.tokenizer.encode(video) for video in videos])
    truth = videos[:, options.context_frames :]
    dreams = {name: dream(world, tokens, actions, name, HORIZON, options) for name in STRATEGIES}
    rows = {
        "tokenizer reconstruction": decode(world, tokens[:, options.context_frames :]),
        **{name: decode(world, dream) for name, dream in dreams.items()},
        "copy of the last context frame": videos[:, options.context_frames - 1, None].expand_as(
            truth
        ),
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
    turns = turning(world, tokens, actions, videos, options)
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
        "turning": turns,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "doom.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(quality, options.out / "doom_quality.png")
    chosen = torch.cat([truth[:3], *(rows[name][:3] for name in ("raster", "k=2", "k=1"))], 1)
    write_image(options.out / "doom_dreams.png", contact_sheet(chosen.flatten(0, 1), HORIZON))
    for name, values in quality.items():
        print(f"{name:32s} PSNR", *(f"{value:5.2f}" for value in values["psnr"]))
        print(f"{'':32s} SSIM", *(f"{value:5.3f}" for value in values["ssim"]))
    print("tokens equal to raster:", json.dumps(agreement))
    print("turning:", json.dumps(turns))


def dream(
    world: VideoGenerator,
    tokens: Tensor,
    actions: Tensor,
    strategy: str,
    num_frames: int,
    options: Options,
) -> Tensor:
    """Continue every clip's context with its recorded actions: (N, T, height, width) tokens."""
    codes, count = world.tokenizer.codebook_size, options.context_frames
    sampling = SamplingOptions(
        GenerationDefaults.temperature, None, GenerationDefaults.top_p, (0, codes)
    )
    ids = actions[..., None] + codes
    prompts = torch.cat([ids[:, :count], tokens[:, :count].flatten(2)], dim=2).flatten(1)[:, 1:]
    future = ids[:, count : count + num_frames]
    parts = []
    for start in track(range(0, len(tokens), options.batch_size), description=strategy):
        rows = slice(start, start + options.batch_size)
        out = generate_tokens(
            world.model,
            prompts[rows],
            strategy,
            future[rows],
            count,
            sampling=sampling,
            seed=options.seed + start,
            grid=TokenGrid(num_frames, world.height, world.width),
        )
        parts.append(out.tokens)
    return torch.cat(parts)


def decode(world: VideoGenerator, tokens: Tensor) -> Tensor:
    """(N, T, height, width) tokens -> (N, T, H_px, W_px, 3) uint8."""
    return torch.stack([world.tokenizer.decode(clip) for clip in tokens])


def turning(
    world: VideoGenerator, tokens: Tensor, actions: Tensor, videos: Tensor, options: Options
) -> dict[str, float]:
    """Turn left and right from the same frames, and measure how the picture moves."""
    assert world.vocabulary is not None
    last = videos[:, options.context_frames - 1]
    dreams, shifts = {}, {}
    for name in ("left", "right"):
        ordered = actions.clone()
        ordered[:, options.context_frames :] = world.vocabulary.tokens_of(name)[0]
        turned = dream(world, tokens, ordered, "k=1", TURN_FRAMES, options)
        dreams[name] = decode(world, turned)
        shifts[name] = torch.tensor(
            [
                shift_px(before, after)
                for before, after in zip(last, dreams[name][:, 0], strict=True)
            ]
        ).float()
    pictures = [
        frame
        for clip in range(min(4, len(videos)))
        for frame in (*dreams["left"][clip].flip(0), last[clip], *dreams["right"][clip])
    ]
    sheet = contact_sheet(torch.stack(pictures), 2 * TURN_FRAMES + 1)
    options.out.mkdir(parents=True, exist_ok=True)
    write_image(options.out / "doom_turns.png", sheet)
    return {
        "left_shift_px_median": shifts["left"].median().item(),
        "right_shift_px_median": shifts["right"].median().item(),
        "clips_turning_opposite_ways": ((shifts["left"] > 0) & (shifts["right"] < 0))
        .float()
        .mean()
        .item(),
    }


def shift_px(before: Tensor, after: Tensor, largest: int = 64) -> int:
    """Return by how many columns a picture moved right: the shift whose overlap differs least."""
    before, after = before.float(), after.float()
    width = before.shape[1]
    errors = {}
    for shift in range(-largest, largest + 1):
        old = before[:, max(0, -shift) : width - max(0, shift)]
        new = after[:, max(0, shift) : width - max(0, -shift)]
        errors[shift] = (old - new).abs().mean().item()
    return min(errors, key=errors.__getitem__)


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
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Options))
