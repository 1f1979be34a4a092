"""Messages of a page, checked here and nowhere else, and the frames that are sent to it."""

import json
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from diagd.data.actions import ActionCodec
from diagd.web.guard import STRICT, read_json
from diagd.web.play.session import Action, Controls

MAX_MESSAGE_BYTES = 1024


@dataclass(frozen=True, config=STRICT)
class Act:
    """A key went down or up: what is pressed now. `id` counts up and is echoed by the frame."""

    action: Action
    id: int
    type: Literal["act"] = "act"


@dataclass(frozen=True, config=STRICT)
class Adjust(Controls):
    """Controls for the frames to come; `paced` holds the world to its own frame rate."""

    _: KW_ONLY
    paced: bool
    type: Literal["adjust"] = "adjust"


@dataclass(frozen=True, config=STRICT)
class Begin:
    """Start anew: from a scene, or (None) from where this session began."""

    scene: int | None
    seed: int
    type: Literal["begin"] = "begin"


@dataclass(frozen=True, config=STRICT)
class Pause:
    paused: bool
    type: Literal["pause"] = "pause"


@dataclass(frozen=True, config=STRICT)
class Record:
    on: bool
    type: Literal["record"] = "record"


@dataclass(frozen=True, config=STRICT)
class Seen:
    """The page has drawn this frame."""

    frame: int
    type: Literal["seen"] = "seen"


Message = Act | Adjust | Begin | Pause | Record | Seen
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def parse(text: str, codec: ActionCodec) -> Message:
    """Parse a message, whose action the model has, or raise ValueError."""
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} characters, got {len(text)}")
    if isinstance(message := read_json(_MESSAGES, text, "message"), Act):
        codec.tokens_of(message.action)
    return message


def pack(header: dict[str, Any], picture: bytes) -> bytes:
    """Pack a frame's header and its picture into one message."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(4) + text + picture


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    end = 4 + int.from_bytes(message[:4])
    return json.loads(message[4:end]), message[end:]
