"""What a video goes on from, in whatever form it comes: a file, arrays, pictures.

A prompt file is a video, a still image, or a recording (see `diagd.families.clip_files`). A video's
actions are in the jsonl file beside it; a recording has its own.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diagd.data.actions import (
    ActionCodec,
    Actions,
    as_actions,
    idle_action,
    read_actions,
    split_actions,
)
from diagd.data.video import Video, read_video, video_length
from diagd.families.clip_files import ClipFile
from diagd.families.defaults import GenerationDefaults
from diagd.tokenizers.vq import VideoTokenizer

logger = logging.getLogger("diagd")


class Image(Protocol):
    """A picture of PIL, which diagd does not need."""

    def convert(self, mode: str) -> Any:
        """Return the picture in another mode, such as RGB."""
        ...


Picture = Image | NDArray[np.uint8] | Tensor  # (H_px, W_px, 3) uint8 RGB
Clip = str | Path | Picture | Sequence[Picture]  # a path, or (T, H_px, W_px, 3) uint8 RGB


@dataclass(frozen=True)
class Prompt:
    """What a video goes on from.

    Attributes:
        frames: (m, H_px, W_px, 3) uint8, the context, of the model's size.
        context_actions: the m - 1 actions between them; None for a model without actions.
        coming_actions: what a recording holds of the actions after them.
        fps: frames a second to write.
        notes: what was done that nobody asked for, a line each.
    """

    frames: Tensor
    context_actions: list[str] | None
    coming_actions: list[str]
    fps: float
    notes: list[str]


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for one model.

    Attributes:
        vocabulary: its actions; None for a model without.
        size_px: (height_px, width_px) of its frames.
    """

    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None
    defaults: GenerationDefaults
    size_px: tuple[int, int]

    def read(self, clip: Clip, actions: Actions | None = None) -> Prompt:
        """Read a prompt in any form, and log what was done that nobody asked for.

        Args:
            clip: a path (see `read_file`), of whose frames the model sees as many as it does by
                default; or pictures of any size, all of which are seen: an
                array, a tensor or a picture of PIL, or a list of them, uint8 RGB.
            actions: between the frames, instead of those that the file has; by default the idle
                action stands there.

        Raises:
            FileNotFoundError, ValueError: no such file, a damaged one, or no frames or actions.
        """
        prompt = self._read(clip, actions)
        for note in prompt.notes:
            logger.warning(note)
        return prompt

    def _read(self, clip: Clip, actions: Actions | None) -> Prompt:
        if isinstance(clip, str | Path):
            prompt = self.read_file(Path(clip))
            frames, fps, notes = prompt.frames, prompt.fps, prompt.notes
            if actions is None:
                return prompt
        else:
            fps, notes = self.defaults.fps, []
            frames = self._fitted(as_frames(clip), notes)
        if self.vocabulary is None:
            if actions is not None and len(actions):
                raise ValueError("this model takes no actions")
            return Prompt(frames, None, [], fps, notes)
        between = len(frames) - 1
        if actions is not None:
            names = as_actions(actions, self.vocabulary, between)
        else:
            names = self._idle(between, "the prompt", notes)
        return Prompt(frames, names, [], fps, notes)

    def read_file(
        self, path: Path, context_frames: int | None = None, num_frames: int = 0
    ) -> Prompt:
        """Read a prompt from a file.

        The last frames of a video are continued. Of a recording, the first frames are the context,
        and its own actions are what comes next. A video with no actions beside it is shown at the
        model's frame rate if its own is higher, with the idle action between its frames.

        Args:
            context_frames: frames that the model should see; as it does by default, if None.
            num_frames: actions to read from a recording.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged, or too short for the model.
        """
        step = self.tokenizer.temporal_compression
        wanted = self.defaults.context_frames if context_frames is None else context_frames
        if (wanted - 1) % step:
            raise ValueError(
                f"context_frames must be 1 or a multiple of {step} and one more: the tokenizer "
                f"joins {step} frames, got {wanted}"
            )
        notes: list[str] = []
        clip_file = ClipFile(path.stem, path, self.vocabulary)
        if clip_file.recording_format:
            return self._read_recording(clip_file, wanted, num_frames, notes)
        action_file = path.with_suffix(".jsonl")
        taken: list[str] | None = None
        if self.vocabulary is not None and action_file.is_file():
            video = read_video(path)
            taken = read_actions(action_file, self.vocabulary, len(video.frames))
        else:
            video = self._read_video(path, wanted, notes)
        count = min(wanted, len(video.frames))
        count -= (count - 1) % step
        if 1 < count < wanted:
            notes.append(f"prompt has {count} frames: the model sees no more than these")
        frames = self._fitted(video.frames[-count:], notes)
        if taken is not None:
            taken = taken[len(taken) - count + 1 :]
        elif self.vocabulary is not None:
            taken = self._idle(count - 1, path.name, notes)
        fps = float(video.fps) if len(video.frames) > 1 else self.defaults.fps
        return Prompt(frames, taken, [], fps, notes)

    def _read_recording(
        self, clip_file: ClipFile, wanted: int, num_frames: int, notes: list[str]
    ) -> Prompt:
        if self.vocabulary is None:
            raise ValueError(
                f"{clip_file.path}: a recording has actions, and this model takes none"
            )
        stored = clip_file.check(wanted)
        clip = clip_file.read(min(wanted + num_frames, stored))
        between, coming = split_actions(clip.actions, wanted)
        frames = self._fitted(clip.frames[:wanted], notes)
        return Prompt(frames, between, coming or [], float(clip.fps), notes)

    def _read_video(self, path: Path, wanted: int, notes: list[str]) -> Video:
        """Read the last frames of any video, at the model's rate where that is lower."""
        _, stored = video_length(path)
        fps = self.defaults.fps
        if float(stored) <= fps * 1.01:
            return read_video(path, last=wanted)
        video = read_video(path, last=wanted, fps=fps)
        if len(video.frames) > 1:
            notes.append(f"prompt has {float(stored):g} frames/s: read at the model's {fps:g}")
        return video

    def _idle(self, count: int, where: str, notes: list[str]) -> list[str]:
        assert self.vocabulary is not None
        idle = idle_action(self.vocabulary)
        if count:
            notes.append(f"{where} comes without actions: {idle!r} stands between its frames")
        return [idle] * count

    def _fitted(self, frames: Tensor, notes: list[str]) -> Tensor:
        """Return frames of the model's size, and note if that took some doing."""
        if tuple(frames.shape[1:3]) == self.size_px:
            return frames
        given, wanted = ("x".join(map(str, size)) for size in (frames.shape[1:3], self.size_px))
        notes.append(f"prompt is {given} pixels: cropped to the centre and scaled to {wanted}")
        return self.tokenizer.fit_frames(frames, *self.size_px)


def seed_of(name: str, seed: int) -> int:
    """Return a clip's seed: the same under every strategy and whatever other clips there are."""
    return (zlib.crc32(name.encode()) + seed) % 2**31


def is_batch(given: Any) -> bool:
    """Tell a batch of clips from a clip: a list of pictures is a clip, any other list is a batch.

    (B, T, H_px, W_px, 3) is a batch, too.
    """
    if isinstance(given, list | tuple):
        return not given or not _is_picture(given[0])
    return getattr(given, "ndim", 0) == 5


def rows_of(clips: Any, actions: Any, context_actions: Any) -> list[tuple[Any, Any, Any]]:
    """Return each clip of a batch, or the only one, with its actions and those between its frames.

    Raises:
        ValueError: no clips, or not as many sequences of actions.
    """
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


def check_one_length(batch: list[Tensor]) -> int:
    """Return how many frames each clip has, or raise ValueError if they differ."""
    lengths = list(dict.fromkeys(map(len, batch)))
    if len(lengths) > 1:
        given = " and ".join(map(str, lengths))
        raise ValueError(f"clips of a batch must have as many context frames, got {given}")
    return lengths[0]


def as_frames(given: Picture | Sequence[Picture]) -> Tensor:
    """Return pictures as (T, H_px, W_px, 3) uint8 RGB on the CPU, or where the tensor is.

    Args:
        given: an array or a tensor of that shape, or a picture, which is (H_px, W_px, 3) or of PIL,
            or a list of pictures of one size.

    Raises:
        ValueError: another shape or dtype.
    """
    if isinstance(given, list | tuple):
        frames = [as_frames(picture) for picture in given]
        sizes = dict.fromkeys("x".join(map(str, frame.shape[1:3])) for frame in frames)
        if len(sizes) != 1:
            raise ValueError(f"pictures of a clip must be of one size, got {', '.join(sizes)}")
        return torch.cat(frames)
    pixels: Any = given
    if not isinstance(given, Tensor):
        convert = getattr(given, "convert", None)
        pixels = np.asarray(convert("RGB") if convert else given)
    shape, dtype = tuple(pixels.shape), str(pixels.dtype).removeprefix("torch.")
    if dtype != "uint8" or len(shape) not in (3, 4) or shape[-1] != 3 or 0 in shape:
        raise ValueError(f"frames must be (T, H_px, W_px, 3) uint8 RGB, got {dtype} {shape}")
    if not isinstance(pixels, Tensor):
        pixels = torch.from_numpy(np.array(pixels))  # a copy: arrays may be read-only or reversed
    return pixels if pixels.ndim == 4 else pixels[None]


def _is_picture(given: Any) -> bool:
    return hasattr(given, "convert") or getattr(given, "ndim", 0) == 3
