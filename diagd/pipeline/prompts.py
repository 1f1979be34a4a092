"""Prompts: clips and texts in the forms that users give, read, checked and tokenized."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from diagd.data.actions import ActionCodec, split_actions
from diagd.data.frames import rgb_of
from diagd.data.video import read_video
from diagd.decoding.schedule import FrameFormat
from diagd.decoding.teacher_forcing import in_sequence
from diagd.families.clip_files import ClipFile
from diagd.files import encoded
from diagd.metrics.quality import psnr
from diagd.tokenizers.vq import VideoTokenizer


@dataclass(frozen=True)
class Prompt:
    """Frames and actions for a video to continue."""

    frames: Tensor  # (m, H_px, W_px, 3) uint8, the context, of the model's size
    context_actions: list[str] | None  # the m - 1 actions between; None for a model without
    coming_actions: list[str]  # actions after them, as far as known
    fps: float  # frames per second of the output
    notes: list[str]  # implicit changes, a line each


Picture = Image | NDArray[np.uint8] | Tensor  # (H_px, W_px, 3) uint8 RGB
Clip = str | Path | Picture | Sequence[Picture]  # a path, or (T, H_px, W_px, 3) uint8 RGB


def read_clip(
    clip: Clip | None,
    codec: ActionCodec | None,
    wanted: int,
    num_coming: int,
    model_fps: float,
    frames_per_grid: int,
) -> Prompt:
    """Read a prompt of `wanted` frames, of any size, from a file; of pictures, all of them.

    The context is the last frames of a video, which may have fewer; or the first frames of a
    recording, with its next `num_coming` actions. For a file without actions, `context_actions`
    is None. A video is resampled to the model's frame rate if its own is higher.
    """
    if not isinstance(clip, str | Path):
        return Prompt(as_frames(clip), None, [], model_fps, [])
    if (wanted - 1) % frames_per_grid:
        raise ValueError(
            f"context_frames must be 1 or 1 more than a multiple of {frames_per_grid}: the "
            f"tokenizer joins {frames_per_grid} frames, got {wanted}"
        )
    path = Path(clip)
    if (clip_file := ClipFile(path.stem, path, codec)).recording_format:
        if codec is None:
            raise ValueError(f"{path}: this model takes no actions, got a recording with actions")
        read = clip_file.read(min(wanted + num_coming, clip_file.check(wanted)))
        between, coming = split_actions(read.actions, wanted)
        return Prompt(read.frames[:wanted], between, coming or [], float(read.fps), [])
    has_actions = codec is not None and path.with_suffix(".jsonl").is_file()
    actions, notes = clip_file.actions() if has_actions else None, list[str]()
    times = clip_file.times()
    fps = None if has_actions else times.slower(model_fps)
    video = read_video(path, last=wanted, fps=fps)
    if fps is not None and len(video.frames) > 1:
        given_fps = float(times.max_rate)
        notes.append(f"prompt has {given_fps:g} frames/s: resampled to the model's {model_fps:g}")
    given = len(video.frames)
    count = given - (given - 1) % frames_per_grid
    if given > 1 and count < wanted:
        seen = "all of them" if count == given else f"the last {count}"
        notes.append(f"prompt has {given} frames: the model sees {seen}")
    shown_fps = float(video.fps) if given > 1 else model_fps
    between = actions and actions[len(actions) - count + 1 :]
    return Prompt(video.frames[-count:], between, [], shown_fps, notes)


# Scenes of the bundled world lie 0 to 6 dB below its prompt, drawings and noise 10 to 20.
FOREIGN_DB = 8


def likeness_notes(tokenizer: VideoTokenizer, folder: Path, frame: Tensor) -> list[str]:
    """Return a line if a frame is unlike the training data of a world, else none.

    The tokenizer reconstructs such a frame, (H_px, W_px, 3) uint8 of the world's size, worse than
    the prompt in its folder; the model's likelihood does not show it (dev/LOG.md).
    """
    usual = _own_psnr(tokenizer, folder, frame.shape[:2])
    if usual is None or (kept := _kept(tokenizer, frame[None].cpu())) > usual - FOREIGN_DB:
        return []
    return [
        "picture unlike the world's training data, which may dissolve soon (reconstructed at "
        f"{kept:.0f} dB, the world's own prompt at {usual:.0f} dB)"
    ]


@lru_cache(maxsize=1)
def _own_psnr(tokenizer: VideoTokenizer, folder: Path, size_px: tuple[int, int]) -> float | None:
    """Return the PSNR in dB of a world's reconstructed prompt; None if it has no prompt."""
    own = folder / "prompt.mp4"
    if not own.is_file() or tokenizer.temporal_compression > 1:
        return None
    return _kept(tokenizer, tokenizer.fit_frames(read_video(own, last=1).frames, *size_px))


def _kept(tokenizer: VideoTokenizer, frame: Tensor) -> float:
    return psnr(tokenizer.decode(tokenizer.encode(frame)), frame).item()


def check_held(
    tokenizer: VideoTokenizer, held: int, num_context: int, context_grids: int, num_frames: int
) -> None:
    """Raise ValueError if a model that holds `held` grids has no room for those of a video.

    Grids of several frames are decoded after the first one, which must stay in the context.
    """
    grids = context_grids + num_frames // tokenizer.temporal_compression
    if tokenizer.temporal_compression > 1 and grids > held:
        raise ValueError(
            f"context too small: {num_context} frames and {num_frames} new ones are {grids} grids, "
            f"the model holds {held}"
        )


def seed_of(name: str, seed: int) -> int:
    """Return a clip's seed, independent of strategy and of other clips."""
    return (zlib.crc32(encoded(name)) + seed) % 2**31


def is_batch(given: Any) -> bool:
    """Return whether this is (B, T, H_px, W_px, 3), or a list of anything but pictures."""
    if isinstance(given, list | tuple):
        return not given or not (isinstance(given[0], Image) or getattr(given[0], "ndim", 0) == 3)
    return getattr(given, "ndim", 0) == 5


def rows_of(clips: Any, actions: Any, context_actions: Any) -> list[tuple[Any, Any, Any]]:
    """Return the clips of a batch, or the only one, with their actions and context actions."""
    if not is_batch(clips):
        return [(clips, actions, context_actions)]
    if not len(clips):
        raise ValueError("a batch must hold at least one clip, got an empty list")
    columns = [list(clips)]
    for what, values in (("actions", actions), ("context_actions", context_actions)):
        values = [None] * len(clips) if values is None else values
        if isinstance(values, str) or len(values) != len(clips):
            given = repr(values) if isinstance(values, str) else len(values)
            raise ValueError(
                f"{what} of a batch: expected {len(clips)}, one for each clip, got {given}"
            )
        columns.append(list(values))
    return list(zip(*columns, strict=True))


def as_frames(given: Picture | Sequence[Picture] | None) -> Tensor:
    """Return pictures as (T, H_px, W_px, 3) uint8 RGB on the CPU, or on the tensor's device."""
    if isinstance(given, list | tuple):
        frames = [as_frames(picture) for picture in given]
        sizes = dict.fromkeys("x".join(map(str, frame.shape[1:3])) for frame in frames)
        if len(sizes) != 1:
            raise ValueError(f"pictures of a clip must be of one size, got {', '.join(sizes)}")
        return torch.cat(frames)
    pixels: Any = given
    if not isinstance(given, Tensor):
        pixels = rgb_of(given) if isinstance(given, Image) else np.asarray(given)
    shape, dtype = tuple(pixels.shape), str(pixels.dtype).removeprefix("torch.")
    if dtype != "uint8" or len(shape) not in (3, 4) or shape[-1] != 3 or 0 in shape:
        raise ValueError(f"frames must be (T, H_px, W_px, 3) uint8 RGB, got {dtype} {shape}")
    if not isinstance(pixels, Tensor):
        pixels = torch.from_numpy(np.array(pixels))  # a copy: arrays may be read-only or reversed
    return pixels if pixels.ndim == 4 else pixels[None]


def prompt_tokens(
    prefix: Sequence[int], grids: Tensor, actions: Tensor, frame: FrameFormat
) -> Tensor:
    """Return (1, P) tokens: prefix, and grids (T, height, width) with actions (1, T, n) between."""
    frames = in_sequence(frame.layout(1, 1), actions, grids[None])
    return torch.cat([grids.new_tensor(list(prefix))[None], frames], dim=1)
