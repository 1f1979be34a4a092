"""One page that plays: what it pressed, what it waits for, and what the model does for it next.

The event loop writes the wishes and reads `ready`; the model's thread runs `turn`. Nothing is
queued: wishes overwrite each other (the newest wins), and no frame is dreamt while the page has yet
to draw the last `WINDOW` ones.
"""

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import Act, Adjust, Message, Pause, Record, Seen
from diagd.web.play.pictures import to_jpeg
from diagd.web.play.saved import MAX_FRAMES, SavedDream, check_action
from diagd.web.play.session import Controls, Moment, Session

WINDOW = 2  # frames under way to the page
MAX_RECORDED_FRAMES = 1200


@dataclass(frozen=True, eq=False)
class Frame:
    """A picture for the page: what is said about it (`messages.pack`), and the JPEG."""

    header: dict[str, Any]
    picture: bytes


@dataclass(frozen=True)
class Note:
    """A JSON message for the page; the socket closes after it where `code` is given."""

    document: dict[str, Any]
    code: int | None = None


class Player:
    """A page and its dream.

    Attributes:
        id: random; whoever knows it may fetch the recording and the saved session.
        outbox: what the page is to be sent; at most `WINDOW` frames are in it.
        busy: the model's seconds given to this player, for fairness.
        last_active: when the page last asked for something, by the monotonic clock.
        send_ms: what sending the last frame took.
    """

    def __init__(self, world: VideoGenerator, fps: Fraction) -> None:
        assert world.vocabulary is not None
        self.world, self.fps = world, fps
        self.id = secrets.token_urlsafe(16)
        self.outbox: asyncio.Queue[Frame | Note] = asyncio.Queue()
        self.controls, self.paced, self.paused = Controls(), False, False
        self.idle_action = world.vocabulary.names[0]
        self.pressed = self.tapped = self.idle_action
        self.input_id = 0
        self.wish: SavedDream | None = None  # the dream to begin next
        self.session: Session | None = None
        self.replaying: deque[Moment] = deque()
        self.replayed = self.differing = 0
        self.recording, self.recorded = False, list[bytes]()
        self.sent = self.seen = self.dream = 0
        self.due = self.busy = self.send_ms = 0.0
        self.last_active = time.monotonic()

    def take(self, message: Message) -> None:
        """Follow a message (`Begin` is the hall's: it knows the scenes).

        Raises:
            ValueError: an action or a row_lag that the model does not have, a frame never sent.
        """
        if not isinstance(message, Seen):
            self.last_active = time.monotonic()
        match message:
            case Act(action, number):
                self.pressed = check_action(action, self.world)
                if action != self.idle_action:
                    self.tapped = action
                self.input_id = number
            case Adjust(controls, paced):
                controls.schedule(self.world)
                self.controls, self.paced = controls, paced
            case Pause(paused):
                self.paused = paused
            case Record(on):
                if on and not self.recording:
                    self.recorded = []
                self.recording = on
            case Seen(frame):
                if not self.seen <= frame <= self.sent:
                    raise ValueError(f"seen: frame must be in [{self.seen}, {self.sent}]")
                self.seen = frame
            case _:
                raise AssertionError(message)

    def begin(self, dream: SavedDream) -> None:
        """Wish for another dream, whose moments are replayed first."""
        self.wish, self.last_active = dream, time.monotonic()

    def ready(self, now: float) -> bool:
        """Whether the model has something to do for this player."""
        if self.sent - self.seen >= WINDOW:
            return False
        if self.wish is not None or self.replaying:
            return True
        return self.session is not None and not self.paused and now >= self.due

    def turn(self) -> Frame:
        """Begin the dream wished for, or dream one frame. Runs in the model's thread."""
        started = time.perf_counter()
        if self.wish is not None:
            return self._begin(started)
        session = self.session
        assert session is not None
        if len(session.history) >= MAX_FRAMES:
            raise ValueError(f"this dream has lasted {MAX_FRAMES} frames, which is the longest")
        if self.replaying:
            action, controls, checksum = self.replaying.popleft()
            number = self.input_id
        else:
            # a key that was pressed and let go since the last frame counts, once
            number, action, controls = self.input_id, self.pressed, self.controls
            if action == self.idle_action:
                action = self.tapped
            self.tapped, checksum = self.idle_action, None
        tokens = session.advance(action, controls)
        decoded = time.perf_counter()
        pixels = self.world.tokenizer.decode(tokens)[0].cpu()
        drawn = time.perf_counter()
        picture = to_jpeg(pixels)
        if checksum is not None:
            self.replayed += 1
            self.differing += checksum != session.history[-1].checksum
        if self.recording and len(self.recorded) < MAX_RECORDED_FRAMES:
            self.recorded.append(picture)
        self.due = max(self.due + float(1 / self.fps), time.monotonic()) if self.paced else 0.0
        header = {
            "action": action,
            "order": controls.order,
            "input": number,
            "steps": session.num_steps,
            "runs": session.runs,
            "decode_ms": round((decoded - started) * 1e3, 2),
            "picture_ms": round((drawn - decoded) * 1e3, 2),
            "encode_ms": round((time.perf_counter() - drawn) * 1e3, 2),
        }
        return self._frame(header, picture)

    def _begin(self, started: float) -> Frame:
        wish, self.wish = self.wish, None
        assert wish is not None
        self.session = None  # its memory first
        self.session = Session(self.world, wish.start)
        self.replaying, self.replayed, self.differing = deque(wish.moments), 0, 0
        self.tapped, self.due = self.idle_action, 0.0
        self.dream += 1
        header = {"begun": True, "ms": round((time.perf_counter() - started) * 1e3, 1)}
        return self._frame(header, to_jpeg(wish.start.frames[-1]))

    def _frame(self, header: dict[str, Any], picture: bytes) -> Frame:
        session = self.session
        assert session is not None
        self.sent += 1
        common = {
            "frame": self.sent,
            "dream": self.dream,
            "length": len(session.history),
            "seed": session.start.seed,
            "held": session.engine.num_held,
            "holds": session.max_frames,
            "recorded": len(self.recorded),
            "replay": [self.replayed, self.replayed + len(self.replaying), self.differing],
            "send_ms": round(self.send_ms, 2),
        }
        return Frame(common | header, picture)
