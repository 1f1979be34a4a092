"""What the command line says is to come: actions, by words or a file, and a text."""

from pathlib import Path

from rich.console import Console
from torch import Tensor

from diagd.data.actions import as_actions, parse_actions, read_actions
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import Prompt
from diagd.tokenizers.text import encode_text, read_embedding


def read_coming(
    asked: str | None,
    walk: Path,
    prompt: Prompt,
    world: VideoGenerator,
    num_frames: int,
    console: Console,
) -> list[str] | None:
    """Return one action for each frame to generate.

    Args:
        asked: such as `forward*8,left*4`, whose last action goes on until the frames are full, or a
            jsonl file. None: what the recording goes on with, or else the model's own walk, cut or
            repeated to length.
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
        if actions is None:
            actions = as_actions(asked, codec, num_frames)
            if 1 < (spelled := len(parse_actions(asked, codec))) < num_frames:
                console.print(
                    f"{spelled} actions for {num_frames} frames: {actions[-1]!r} goes on to the end"
                )
    elif prompt.coming_actions:
        actions = prompt.coming_actions
    else:
        if not walk.is_file():
            raise FileNotFoundError(
                f"no {walk} to follow: give --actions, such as {codec.names[-1]}*{num_frames}"
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
