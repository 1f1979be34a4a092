"""Frames to learn from: rectangles of colour, and a tokenizer small enough for tests."""

from pathlib import Path

import torch
from torch import Tensor

from diagd.data.actions import write_actions
from diagd.data.video import write_video
from diagd.tokenizers.linear_init import linear_tokenizer_model
from diagd.tokenizers.vq import VQTokenizer


def rectangles(num_frames: int, seed: int = 0, size: tuple[int, int] = (24, 40)) -> Tensor:
    """Draw (num_frames, H_px, W_px, 3) uint8: three rectangles on a ground, in a frame."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.empty(num_frames, *size, 3, dtype=torch.uint8)
    for frame in frames:
        frame[:] = torch.randint(0, 256, (3,), generator=generator)
        for _ in range(3):
            top = int(torch.randint(0, size[0] - 4, (1,), generator=generator))
            left = int(torch.randint(0, size[1] - 4, (1,), generator=generator))
            frame[top : top + 9, left : left + 11] = torch.randint(
                0, 256, (3,), generator=generator
            )
    return frames


def small_tokenizer(codes: int = 20, seed: int = 0) -> VQTokenizer:
    """Sixteen channels, six-dimensional codes, 8 x 8 pixels a token."""
    return VQTokenizer(linear_tokenizer_model(rectangles(32), codes, seed, width=16))


def write_clips(
    folder: Path, num_clips: int = 3, num_frames: int = 4, actions: bool = True
) -> list[Path]:
    """Write clips of rectangles, each with actions forward, left, forward ... after a none."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"clip_{number:06d}.mp4" for number in range(num_clips)]
    for number, path in enumerate(paths):
        write_video(path, rectangles(num_frames, seed=number))
        if actions:
            names = ["none"] + ["forward", "left"] * num_frames
            write_actions(path.with_suffix(".jsonl"), names[:num_frames])
    return paths
