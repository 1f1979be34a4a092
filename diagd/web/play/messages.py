"""Frames as JPEG for the page, and a recording of them as mp4."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diagd.data.video import encode_video
from diagd.web.play.session import MAX_SEED, Controls

QUALITY = 92


def to_jpeg(frame: Tensor) -> bytes:
    """Compress one (H_px, W_px, 3) uint8 RGB frame, its colours at full resolution."""
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def from_jpeg(picture: bytes) -> Tensor:
    """Undo `to_jpeg`, at JPEG's loss. Only for pictures that we made."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture))))


def to_mp4(pictures: Sequence[bytes], fps: Fraction | float) -> bytes:
    """Turn the JPEGs of a recording into an mp4."""
    return encode_video(torch.stack([from_jpeg(picture) for picture in pictures]), fps)


MAX_MESSAGE_BYTES = 1024


@dataclass(frozen=True)
class Act:
    """A key went down or up: what is pressed now. `id` counts up and is echoed by the frame."""

    action: str
    id: int


@dataclass(frozen=True)
class Adjust:
    """Controls for the frames to come; `paced` holds the world to its own frame rate."""

    controls: Controls
    paced: bool


@dataclass(frozen=True)
class Begin:
    """Start anew: from a scene, or (None) from where this session began."""

    scene: int | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"begin: seed must be in [0, {MAX_SEED})")


@dataclass(frozen=True)
class Pause:
    """Stop, or go on."""

    paused: bool


@dataclass(frozen=True)
class Record:
    """Keep the frames from now on, or stop keeping them."""

    on: bool


@dataclass(frozen=True)
class Seen:
    """The page has drawn this frame."""

    frame: int


Message = Act | Adjust | Begin | Pause | Record | Seen
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "act": {"action": str, "id": int},
    "adjust": {"strategy": str, "temperature": (int, float), "top_p": (int, float), "paced": bool},
    "begin": {"scene": (int, type(None)), "seed": int},
    "pause": {"paused": bool},
    "record": {"on": bool},
    "seen": {"frame": int},
}
CLASSES = {"act": Act, "begin": Begin, "pause": Pause, "record": Record, "seen": Seen}


def parse(text: str) -> Message:
    """Read one message.

    Raises:
        ValueError: no JSON object, an unknown type, a missing, foreign or ill-typed field, or a
            number out of its range.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} characters, got {len(text)}")
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("a message must be a JSON object") from None
    if not isinstance(document, dict):
        raise ValueError("a message must be a JSON object")
    kind = document.pop("type", None)
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ValueError(f"unknown message, expected one of: {', '.join(FIELDS)}")
    if document.keys() != fields.keys():
        raise ValueError(f"{kind} must have the fields {', '.join(fields)}")
    for name, expected in fields.items():
        given = type(document[name])
        if given not in (expected if isinstance(expected, tuple) else (expected,)):
            raise ValueError(f"{kind}: {name} must not be {given.__name__}")
    if kind == "adjust":
        paced = document.pop("paced")
        return Adjust(Controls(**document), paced)
    return CLASSES[kind](**document)


def pack(header: dict[str, Any], picture: bytes) -> bytes:
    """Put a frame's header and its picture into one message."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(4) + text + picture


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Take `pack` apart."""
    end = 4 + int.from_bytes(message[:4])
    return json.loads(message[4:end]), message[end:]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
