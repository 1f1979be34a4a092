"""What a video goes on from: frames, the actions between them and those to come, a text.

A prompt is a video, a still image, or a recording (see `diagd.families.clip_files`). A video's
actions are in the jsonl file beside it; a recording has its own.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import Tensor

from diagd.data.actions import parse_actions, read_actions, split_actions
from diagd.data.video import read_video
from diagd.families.clip_files import ClipFile
from diagd.pipeline.generator import VideoGenerator
from diagd.tokenizers.text import encode_text, read_embedding


@dataclass(frozen=True)
class Prompt:
    """What a video goes on from.

    Attributes:
        frames: (m, H_px, W_px, 3) uint8, the context, of the model's size.
        context_actions: the m - 1 actions between them; None for a model without actions.
        coming_actions: what a recording holds of the actions after them.
        fps: frames a second to write.
    """

    frames: Tensor
    context_actions: list[str] | None
    coming_actions: list[str]
    fps: float


def read_prompt(
    path: Path, world: VideoGenerator, wanted: int, num_frames: int, console: Console
) -> Prompt:
    """Read a prompt.

    The last frames of a video are continued. Of a recording, the first frames are the context, and
    its own actions are what comes next.

    Args:
        wanted: frames that the model should see.
        num_frames: frames to generate.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or too short for the model.
    """
    step = world.tokenizer.temporal_compression
    if (wanted - 1) % step:
        raise ValueError(
            f"context_frames must be 1 or a multiple of {step} and one more: the tokenizer joins "
            f"{step} frames, got {wanted}"
        )
    clip_file = ClipFile(path.stem, path, world.vocabulary)
    if clip_file.recording_format:
        return _read_recording(clip_file, world, wanted, num_frames, console)
    video = read_video(path)
    count = min(wanted, len(video.frames))
    count -= (count - 1) % step
    if 1 < count < wanted:
        console.print(f"prompt has {count} frames: the model sees no more than these")
    fps = float(video.fps) if len(video.frames) > 1 else world.defaults.fps
    actions = None
    if world.vocabulary is not None:
        actions = []
        if count > 1:
            taken = read_actions(path.with_suffix(".jsonl"), world.vocabulary, len(video.frames))
            actions = taken[len(taken) - count + 1 :]
    return Prompt(_fitted(video.frames[-count:], world, console), actions, [], fps)


def _read_recording(
    clip_file: ClipFile, world: VideoGenerator, wanted: int, num_frames: int, console: Console
) -> Prompt:
    if world.vocabulary is None:
        raise ValueError(f"{clip_file.path}: a recording has actions, and this model takes none")
    stored = clip_file.check(wanted)
    clip = clip_file.read(min(wanted + num_frames, stored))
    between, coming = split_actions(clip.actions, wanted)
    frames = _fitted(clip.frames[:wanted], world, console)
    return Prompt(frames, between, coming or [], float(clip.fps))


def _fitted(frames: Tensor, world: VideoGenerator, console: Console) -> Tensor:
    """Return frames of the model's size, and say so if that took some doing."""
    height_px, width_px = world.frame_size_px
    if frames.shape[1:3] == (height_px, width_px):
        return frames
    given = "x".join(map(str, frames.shape[1:3]))
    console.print(
        f"prompt is {given} pixels: cropped to the centre and scaled to {height_px}x{width_px}"
    )
    return world.tokenizer.fit_frames(frames, height_px, width_px)


def read_coming(
    asked: str | None, walk: Path, prompt: Prompt, world: VideoGenerator, num_frames: int
) -> list[str] | None:
    """Return one action for each frame to generate.

    Args:
        asked: such as `forward*8,left*4`, or a jsonl file. None: what the recording goes on with,
            or else the model's own walk, cut or repeated to length.
        walk: the jsonl file of that walk.

    Raises:
        FileNotFoundError, ValueError: no such actions, or not one for each frame.
    """
    codec = world.vocabulary
    if codec is None:
        if asked is not None:
            raise ValueError("this model takes no actions")
        return None
    if asked is not None:
        actions = read_actions(asked, codec) if asked.endswith(".jsonl") else None
        actions = parse_actions(asked, codec) if actions is None else actions
    elif prompt.coming_actions:
        actions = prompt.coming_actions
    else:
        if not walk.is_file():
            raise FileNotFoundError(
                f"no {walk} to follow: give --actions, such as {codec.names[1]}*{num_frames}"
            )
        steps = read_actions(walk, codec)
        actions = [steps[frame % len(steps)] for frame in range(num_frames if steps else 0)]
    if len(actions) != num_frames:
        raise ValueError(f"expected {num_frames} actions (one a frame), got {len(actions)}")
    return actions


def read_text(
    text: str | None, encoder: Path | None, embedding: Path | None, size: int
) -> Tensor | None:
    """Return the text as a model with cross-attention reads it, (1, places, size), or None.

    Args:
        size: width that the model reads; 0 for models without text.

    Raises:
        FileNotFoundError, ValueError: a text too many or too few, or one of another width.
    """
    if not size:
        if (text, encoder, embedding) != (None, None, None):
            raise ValueError("this model reads no text")
        return None
    if embedding is not None:
        states = read_embedding(embedding)
    elif text is not None and encoder is not None:
        states = encode_text(text, encoder)
    else:
        raise ValueError(
            "this model reads a text: give --text with --text-encoder FOLDER (T5), "
            "or --text-embedding FILE"
        )
    if states.shape[2] != size:
        raise ValueError(f"the model reads a text of width {size}, got {states.shape[2]}")
    return states
