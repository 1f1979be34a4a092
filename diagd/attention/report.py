"""Attention on recorded clips: measured, drawn, and written down."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.attention.analysis import KINDS, measure_attention
from diagd.attention.figure import draw_attention
from diagd.attention.options import AttentionOptions
from diagd.backends.devices import device_of
from diagd.console import make_console, print_table
from diagd.data.actions import read_actions
from diagd.data.video import read_video, resize
from diagd.families.checkpoints import model_path
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.pretrained import load_parts


def report_attention(options: AttentionOptions) -> dict[str, Any]:
    """Measure, draw, print and write the numbers; return them and where they went.

    Raises:
        FileNotFoundError, ValueError: a model or clips that are missing or do not fit.
    """
    parts = load_parts(options.model, device_of(options.device))
    config = parts.model.config
    world = VideoGenerator(
        parts.model, "eager", config, parts.tokenizer, parts.vocabulary, parts.defaults
    )
    clips = _clips(options)
    attention = measure_attention(
        parts.model,
        torch.cat([_tokens(clip, options.frame + 1, world) for clip in clips]),
        config.grid_height,
        config.grid_width,
        options.frame,
        num_action_tokens=config.num_action_tokens,
        layer=options.layer,
        head=options.head,
    )
    chosen = [
        f"{name} {number}"
        for name, number in (("layer", options.layer), ("head", options.head))
        if number is not None
    ]
    title = f"{options.model}, frame {options.frame + 1} of {len(clips)} clip(s), "
    title += ", ".join(chosen) or "mean of all layers and heads"
    draw_attention(options.output, title, attention)
    numbers = options.output.with_suffix(".json")
    report = {
        "model": options.model,
        "clips": [clip.name for clip in clips],
        "kinds": list(KINDS),
        **attention.report(),
    }
    write_json(numbers, report, indent=1)
    _print(report, options.output, numbers)
    return {"figure": str(options.output), "numbers": str(numbers), **report}


def _clips(options: AttentionOptions) -> list[Path]:
    path = options.clips or model_path(options.model) / "prompt.mp4"
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.mp4"))[: options.num_clips]
    if not found:
        raise FileNotFoundError(f"no .mp4 in {path}")
    return found


def _tokens(clip: Path, num_frames: int, world: VideoGenerator) -> Tensor:
    """Return (1, N) tokens of the clip's last frames with the actions between them."""
    frames = read_video(clip).frames
    if len(frames) < num_frames:
        raise ValueError(f"{clip} has {len(frames)} frames, expected at least {num_frames}")
    actions = None
    if world.vocabulary is not None:
        taken = read_actions(clip.with_suffix(".jsonl"), world.vocabulary, len(frames))
        actions = taken[len(taken) - num_frames + 1 :]
    return world.prompt(resize(frames[-num_frames:], *world.frame_size_px), actions)[0]


def _print(report: dict[str, Any], figure: Path, numbers: Path) -> None:
    lines = []
    for kind in KINDS:
        share, even = report["shares"][kind], report["shares_if_even"][kind]
        if even:
            name = kind.replace("_", " ")
            lines.append([name, f"{share:.1%}", f"{even:.1%}", f"{share / even:.1f}"])
    console = make_console()
    header = "", "measured", "if it were even", "times even"
    print_table(console, f"{report['model']}: share of attention, all layers", header, lines)
    lost = ", ".join(f"{mass:.1%} ({k})" for k, mass in report["not_written_yet"].items())
    console.print(f"on tokens that diagonals have not written yet: {lost}")
    console.print(f"wrote {figure} and {numbers}")
