"""What the command line says is to come: actions, by words or a file, and a text."""

from pathlib import Path

from torch import Tensor

from diagd.data.actions import ActionCodec, as_actions, parse_actions, read_actions
from diagd.tokenizers.text import encode_text, read_embedding


def asked_actions(
    asked: str | None, codec: ActionCodec | None, num_frames: int, notes: list[str]
) -> list[str] | None:
    """Return one action for each frame to generate, if any were asked for.

    Args:
        asked: such as `forward*8,left*4`, whose last action goes on until the frames are full, or a
            jsonl file.
        codec: of the model's actions; None for a model without.
        notes: gets a line where an action goes on.

    Raises:
        FileNotFoundError, ValueError: no such actions, or not one for each frame.
    """
    if asked is None:
        return None
    if codec is None:
        raise ValueError("this model takes no actions")
    if asked.endswith(".jsonl"):
        return one_a_frame(read_actions(asked, codec), num_frames)
    actions = as_actions(asked, codec, num_frames)
    if 1 < (spelled := len(parse_actions(asked, codec))) < num_frames:
        notes.append(
            f"{spelled} actions for {num_frames} frames: {actions[-1]!r} goes on to the end"
        )
    return one_a_frame(actions, num_frames)


def walk_actions(walk: Path, codec: ActionCodec, num_frames: int) -> list[str]:
    """Return the model's own walk, a jsonl file, cut or repeated to one action for each frame.

    Raises:
        FileNotFoundError, ValueError: no such walk, or a damaged one; an empty one gives nothing.
    """
    if not walk.is_file():
        raise FileNotFoundError(
            f"no {walk} to follow: give --actions, such as {codec.names[-1]}*{num_frames}"
        )
    steps = read_actions(walk, codec)
    return [steps[frame % len(steps)] for frame in range(num_frames if steps else 0)]


def one_a_frame(actions: list[str], num_frames: int) -> list[str]:
    """Return the actions, or raise ValueError unless there is one for each frame."""
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
