"""Frames to learn from: rectangles of colour, and a tokenizer small enough for tests."""

from fractions import Fraction
from pathlib import Path

import av
import torch
from torch import Tensor

from diagd.data.actions import write_actions
from diagd.data.video import write_video
from diagd.tokenizers.linear_init import linear_tokenizer_model
from diagd.tokenizers.vq import VQTokenizer

HEIGHT_PX, WIDTH_PX = 24, 40  # 3 x 5 tokens


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


def encode_video(
    path: Path,
    frames: Tensor,
    rate: Fraction | int = 10,
    codec: str = "mpeg4",
    pixels: str = "yuv420p",
) -> None:
    """Write (T, H_px, W_px, 3) uint8 in the container of the path's suffix, with any codec."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


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
