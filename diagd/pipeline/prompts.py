"""Frames and actions as the one sequence of tokens that a model continues."""

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
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VideoTokenizer


def check_size(frames: Tensor, size_px: tuple[int, int]) -> None:
    """Raise ValueError unless frames are (T, H_px, W_px, 3) of the model's size."""
    if frames.ndim != 4 or frames.shape[1:] != (*size_px, 3):
        height_px, width_px = size_px
        raise ValueError(
            f"frames must be (T, {height_px}, {width_px}, 3) uint8, got {tuple(frames.shape)}"
        )


def check_clip(given: int, coming: int, num_grids: int, config: ModelConfig) -> None:
    """Refuse a clip that must not slide, since a grid of several frames depends on the first."""
    held = config.max_positions // config.tokens_per_frame
    if num_grids > held:
        raise ValueError(
            f"{given} frames and {coming} to come are {num_grids} grids, the model holds {held}"
        )


def grids_of(num_frames: int, step: int) -> int:
    """Return the token grids of generated frames, `step` of which the tokenizer joins.

    Raises:
        ValueError: no whole number of grids.
    """
    if num_frames % step:
        raise ValueError(
            f"num_frames must be a multiple of {step}: the tokenizer joins so many frames, "
            f"got {num_frames}"
        )
    return num_frames // step


def paint(tokenizer: VideoTokenizer, context: Tensor, grids: Tensor) -> Tensor:
    """Return the pixels of generated grids, behind those of the context if they depend on it."""
    if tokenizer.temporal_compression > 1:
        grids = torch.cat([context, grids])
    return tokenizer.decode(grids)


def action_ids(
    codec: ActionCodec | None,
    actions: Actions | None,
    count: int,
    what: str,
    first_id: int,
) -> Tensor | None:
    """Return (1, count, num_tokens) ids, or None for a model without actions.

    Args:
        what: each action stands before, for the error.
        first_id: id of the codec's local id 0.

    Raises:
        ValueError: not `count` actions, one that the codec does not know, or any without a codec.
    """
    if codec is None:
        if actions is not None and len(actions):
            raise ValueError("this model takes no actions")
        return None
    names = [] if actions is None else as_actions(actions, codec, count)
    if len(names) != count:
        raise ValueError(f"expected {count} actions, one for each {what}, got {len(names)}")
    ids = [codec.tokens_of(name) for name in names]
    local = torch.tensor(ids, dtype=torch.int64).view(1, count, codec.num_tokens)
    return local + first_id


def prompt_tokens(prefix: Sequence[int], grids: Tensor, actions: Tensor | None) -> Tensor:
    """Return (1, P): prefix, and the grids with the actions between them.

    Args:
        grids: (T, height, width) int64.
        actions: (1, T - 1, n) int64, or None.
    """
    tokens = grids.flatten(1)
    if actions is not None:
        first = actions.new_zeros(1, actions.shape[2])  # nothing stands before the first frame
        between = torch.cat([first, actions[0]])
        tokens = torch.cat([between, tokens], dim=1).flatten()[actions.shape[2] :]
    return torch.cat([tokens.new_tensor(list(prefix)), tokens.flatten()])[None]


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
