"""What a page may say, checked once, here; and how a frame is sent to it."""

import json
from dataclasses import dataclass
from typing import Any

from diagd.data.actions import ActionCodec
from diagd.web.play.session import Controls, check_action

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


NUMBER = (int, float)
Message = Act | Adjust | Begin | Pause | Record | Seen
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "act": {"action": (str,), "id": (int,)},
    "adjust": {"strategy": (str,), "temperature": NUMBER, "top_p": NUMBER, "paced": (bool,)},
    "begin": {"scene": (int, type(None)), "seed": (int,)},
    "pause": {"paused": (bool,)},
    "record": {"on": (bool,)},
    "seen": {"frame": (int,)},
}
CLASSES = {"act": Act, "begin": Begin, "pause": Pause, "record": Record, "seen": Seen}


def parse(text: str, codec: ActionCodec) -> Message:
    """Read one message.

    Raises:
        ValueError: no JSON object, an unknown type, a missing, foreign or ill-typed field, an
            action that the model does not have, or controls out of their ranges.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} characters, got {len(text)}")
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (json.JSONDecodeError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError("a message must be a JSON object")
    kind = document.pop("type", None)
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"unknown message, expected one of: {', '.join(FIELDS)}")
    if document.keys() != FIELDS[kind].keys():
        raise ValueError(f"{kind} must have the fields {', '.join(FIELDS[kind])}")
    for name, expected in FIELDS[kind].items():
        if type(document[name]) not in expected:
            raise ValueError(f"{kind}: {name} must not be {type(document[name]).__name__}")
    if kind == "adjust":
        paced = document.pop("paced")
        return Adjust(Controls.from_json(document), paced)
    if kind == "act":
        check_action(document["action"], codec)
    return CLASSES[kind](**document)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def pack(header: dict[str, Any], picture: bytes) -> bytes:
    """Return a frame's header and its picture as one message."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(4) + text + picture


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the picture of a packed frame."""
    end = 4 + int.from_bytes(message[:4])
    return json.loads(message[4:end]), message[end:]
