"""All messages between a page and its server, as types: their fields are those of the JSON.

docs/protocol.md describes them to those who write a client of their own. What a page sends
(`PageMessage`, of at most 1024 characters) is checked here, and nowhere else. What it is sent is a
`ServerMessage` on its socket, an `Answer` to an upload, or, where the browser is the engine, the
`Manifest` of the world. Times are in milliseconds.
"""

import dataclasses
import json
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from diagd.client import PROTOCOL
from diagd.data.actions import ActionCodec
from diagd.decoding.strategies.table import Strategy
from diagd.web.guard import STRICT, read_json
from diagd.web.play.session import Action, Controls

MAX_MESSAGE_BYTES = 1024


@dataclass(frozen=True, config=STRICT)
class Act:
    """A key went down or up: what is pressed now. `id` counts up and is echoed by the frame."""

    action: Action  # of `World.actions`, or words of them joined by `+` where these combine
    id: int
    type: Literal["act"] = "act"


@dataclass(frozen=True, config=STRICT)
class Step:
    """Generate one frame of this action, after those asked for before, though paused or paced."""

    action: Action  # as of `Act`
    id: int  # counts on with those of `Act`
    type: Literal["step"] = "step"


@dataclass(frozen=True, config=STRICT)
class Settings(Controls):
    """Controls for the frames to come; `paced` holds the world to its own frame rate."""

    _: KW_ONLY
    paced: bool
    lossless: bool = False  # pictures are PNG, not JPEG


@dataclass(frozen=True, config=STRICT)
class Adjust(Settings):
    """Other settings from the next frame on; those that do not fit are answered by `Kept`."""

    type: Literal["adjust"] = "adjust"


@dataclass(frozen=True, config=STRICT)
class Begin:
    """Start anew: from a scene, or (None) from where this session began."""

    scene: int | None  # place in `World.scenes`
    seed: int  # in [0, `World.max_seed`)
    type: Literal["begin"] = "begin"


@dataclass(frozen=True, config=STRICT)
class Pause:
    """Generate no more frames, or go on."""

    paused: bool
    type: Literal["pause"] = "pause"


@dataclass(frozen=True, config=STRICT)
class Record:
    """Keep the frames to come for a video, from an empty one on, or keep no more."""

    on: bool
    type: Literal["record"] = "record"


@dataclass(frozen=True, config=STRICT)
class Seen:
    """The page has drawn this frame."""

    frame: int  # that of its `Header`
    type: Literal["seen"] = "seen"


PageMessage = Act | Adjust | Begin | Pause | Record | Seen | Step
_MESSAGES = TypeAdapter[PageMessage](Annotated[PageMessage, Field(discriminator="type")])


@dataclasses.dataclass(frozen=True)
class Keyboard:
    """Which keys do what; keys are named as browsers name them (`KeyboardEvent.code`)."""

    idle: str  # the action while nothing is pressed
    keys: dict[str, tuple[str, ...]]  # of each action of one word, maybe none
    labels: dict[str, str]  # text on the cap of each key
    joined: list[str]  # actions of several of these words, such as `forward+left`
    combines: bool  # whether any words may be joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What can be played."""

    grid: tuple[int, int]  # rows and columns of tokens
    size_px: tuple[int, int]  # height and width of a picture
    strategies: list[tuple[str, int | None]]  # names, and steps a frame where these are known
    controls: Settings  # with which a page begins
    fps: float  # frames per second of the world's own pace
    model: str  # name, which saved dreams have, too
    actions: tuple[str, ...]
    axes: list[tuple[str, float, float]]  # of vectors: names, lowest and highest numbers
    keyboard: Keyboard
    scenes: list[str]  # names, in the order in which `Begin` counts them
    max_seed: int  # seeds are in [0, max_seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(World):
    """The world of an exported page, beside which its files lie."""

    bytes: int  # of world.bin
    version: str  # changes with the files
    gpu: bool  # whether a browser's GPU can run it
    written_at: list[tuple[int, ...]]  # as in `Frame`, for each strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcome(World):
    """A place is free: the session begins, at the first scene; the first message but `Waiting`."""

    protocol: int = PROTOCOL
    session: str  # secret, in the addresses of its uploads and downloads
    computed: tuple[str, str]  # dtype of the weights, backend
    max_recorded: int  # frames of a recording
    max_upload_bytes: int
    type: Literal["welcome"] = "welcome"


@dataclasses.dataclass(frozen=True)
class Waiting:
    """All places are taken."""

    before: int  # players who are served earlier
    message: str
    type: Literal["waiting"] = "waiting"


@dataclasses.dataclass(frozen=True)
class Refused:
    """No place in the line either; the socket closes with 1013, and the page may try again."""

    message: str
    type: Literal["refused"] = "refused"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What `Adjust` asked for does not fit this world: the settings stay as they were."""

    message: str
    controls: Settings
    type: Literal["kept"] = "kept"


@dataclasses.dataclass(frozen=True)
class Ended:
    """The session is over; the socket closes with 1000, 1008 (a bad message) or 1011 (a crash)."""

    message: str
    type: Literal["ended"] = "ended"


@dataclasses.dataclass(frozen=True)
class Alive:
    """Sent every 5 seconds where nothing else is: a page gives up after 20 without a word."""

    type: Literal["alive"] = "alive"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What stands before a picture in a binary message (see `pack`)."""

    frame: int  # pictures sent to this page, this one included: `Seen` names it
    session_number: int  # dreams begun for this page
    length: int  # frames of this dream
    seed: int
    held: int  # frames that the model sees
    holds: int  # frames that it sees at most
    replay: tuple[int, int, int]  # frames done of a replay, of how many, and how many differ
    decode_ms: float  # of the model
    encode_ms: float = 0.0  # of the JPEG
    send_ms: float = 0.0  # of the picture before this one
    recorded: int = 0  # frames of the recording under way
    received: int = 0  # the newest id of `Act` and `Step` that was read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Header):
    """A dream begins at this picture."""

    begun: Literal[True] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame(Header):
    """A frame was generated."""

    action: str  # that led to it
    input: int  # the newest id that it has used
    strategy: str
    steps: int
    written_at: tuple[int, ...]  # the step that wrote each token, in raster order
    picture_ms: float = 0.0  # from tokens to pixels


ServerMessage = Welcome | Waiting | Refused | Kept | Ended | Alive | Start | Frame


@dataclasses.dataclass(frozen=True)
class Uploaded:
    """A dream begins at the last frames of an uploaded picture or clip."""

    frames: int
    notes: list[str]  # sentences for the player


@dataclasses.dataclass(frozen=True)
class Replaying:
    """An uploaded dream begins."""

    frames: int
    scene: str | None  # name; None: it begins at frames of its own


Answer = Uploaded | Replaying


def parse(text: str, codec: ActionCodec) -> PageMessage:
    """Parse a message, whose action the model has, or raise ValueError."""
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has at most {MAX_MESSAGE_BYTES} characters, got {len(text)}")
    if isinstance(message := read_json(_MESSAGES, text, "message"), Act | Step):
        codec.tokens_of(message.action)
    return message


def to_json(message: ServerMessage | Manifest) -> str:
    def plain(value: Any) -> Any:
        return value.name if isinstance(value, Strategy) else vars(value)

    return json.dumps(message, default=plain, separators=(",", ":"))


def pack(header: Start | Frame, picture: bytes) -> bytes:
    """Pack a binary message (see `unpack`): the header's length, the header, a JPEG or a PNG."""
    text = to_json(header).encode()
    return len(text).to_bytes(4) + text + picture
