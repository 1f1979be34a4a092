"""The memory of sessions that are over, given back to the system.

A session holds itself (its parts know each other), so it goes only when Python looks for such
circles; and glibc keeps what lies between two pieces still in use, in an arena for each thread.
Short visits left a server with three times the memory it began with, none of it in use. Other C
libraries than glibc give pages back by themselves.
"""

import asyncio
import ctypes
import gc
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor

from diagd.data.actions import idle_action
from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import Act, Adjust, Message, Pause, Record, Seen, to_jpeg
from diagd.web.play.session import (
    MAX_FRAMES,
    Controls,
    FrameRecord,
    PastSession,
    PendingStart,
    Session,
    check_action,
)


def _find_trim() -> Callable[[ctypes.c_size_t], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_TRIM = _find_trim()


def give_back_memory() -> None:
    """Collect what nobody needs, and give its pages back; under `short_collections` in no time."""
    gc.collect()
    if _TRIM is not None:
        _TRIM(ctypes.c_size_t(0))


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


class Welcome:
    """There is a place for the player: the page is to hear what can be played."""


class Player:
    """A page and its session.

    Args:
        fps: frames a second of the world's own pace.
        clock: seconds; the monotonic clock but for tests.
        max_recorded, max_frames: where a recording and a session end.
        controls: until the page says otherwise.

    Attributes:
        id: random; whoever knows it may fetch the recording and the saved session.
        outbox: what the page is to be sent; at most `WINDOW` frames are in it.
        before: how many wait for a place before this player, while it waits.
        busy: the model's seconds given to this player, for fairness.
        last_active: when the page last asked for something, or held a key, by the clock.
        past: the session of a player who left.
        send_ms: what sending the last frame took.
        uploading: whether an upload is under way; a player has one at a time.
    """

    def __init__(
        self,
        world: VideoGenerator,
        fps: Fraction,
        clock: Callable[[], float] = time.monotonic,
        max_recorded: int = MAX_RECORDED_FRAMES,
        max_frames: int = MAX_FRAMES,
        controls: Controls | None = None,
    ) -> None:
        assert world.vocabulary is not None
        self.world, self.fps, self.clock = world, fps, clock
        self.max_recorded, self.max_frames = max_recorded, max_frames
        self.id = secrets.token_urlsafe(16)
        self.outbox: asyncio.Queue[Frame | Note | Welcome] = asyncio.Queue()
        self.before: int | None = None
        self.controls, self.paced, self.paused = controls or Controls(), False, False
        self.idle_action = idle_action(world.vocabulary)
        self.pressed = self.tapped = self.idle_action
        self.input_id = 0
        self.pending_start: PendingStart | None = None
        self.session: Session | None = None
        self.past: PastSession | None = None
        self.replaying: deque[FrameRecord] = deque()
        self.replayed = self.differing = 0
        self.recording, self.recorded = False, list[bytes]()
        self.uploading = False
        self.sent = self.seen = self.num_begun = 0
        self.due = self.busy = self.send_ms = 0.0
        self.last_active = clock()

    def wait(self, before: int, num_places: int) -> None:
        """Tell the page how many wait before it, if it does not know yet."""
        if before == self.before:
            return
        self.before = before
        taken = f"All {num_places} places are taken" if num_places > 1 else "The place is taken"
        turn = f"{before} before you" if before else "you are next"
        message = f"{taken}: {turn}."
        self.outbox.put_nowait(Note({"type": "waiting", "before": before, "message": message}))

    def release(self) -> None:
        """Give the session's memory back; what was recorded and chosen can still be fetched."""
        if self.session is not None:
            self.past = PastSession(self.session.start, self.session.history)
        self.session = self.pending_start = None
        self.replaying.clear()

    def take(self, message: Message) -> None:
        """Follow a message (`Begin` is the scheduler's: it knows the scenes).

        Controls that do not fit the world change nothing, and the page hears why.

        Raises:
            ValueError: an action that the model does not have, a frame never sent.
        """
        if not isinstance(message, Seen):
            self.last_active = self.clock()
        match message:
            case Act(action, number):
                self.pressed = check_action(action, self.world)
                if action != self.idle_action:
                    self.tapped = action
                self.input_id = number
            case Adjust(controls, paced):
                self._adjust(controls, paced)
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

    def _adjust(self, controls: Controls, paced: bool) -> None:
        try:
            controls.check(self.world)
        except ValueError as error:
            if self.outbox.qsize() <= WINDOW:  # to who never listens, no more is said
                kept = {**vars(self.controls), "paced": self.paced}
                note = {"type": "kept", "controls": kept, "message": f"That does not fit: {error}."}
                self.outbox.put_nowait(Note(note))
        else:
            self.controls, self.paced = controls, paced

    def begin(self, pending_start: PendingStart) -> None:
        """Begin another session at the next turn."""
        self.pending_start, self.last_active = pending_start, self.clock()

    def ready(self, now: float) -> bool:
        """Whether the model has something to do for this player."""
        if self.sent - self.seen >= WINDOW:
            return False
        if self.pending_start is not None or self.replaying:
            return True
        return self.session is not None and not self.paused and now >= self.due

    def turn(self) -> Callable[[], Frame]:
        """Begin the session that is pending, or write one frame. Runs in the model's thread.

        Returns:
            what makes the frame for the page; to be called once, in the order of the turns.
        """
        started = time.perf_counter()
        if self.pending_start is not None:
            return self._begin(started)
        session = self.session
        assert session is not None
        if self.replaying or self.pressed != self.idle_action:
            self.last_active = self.clock()
        if len(session.history) >= self.max_frames:
            raise ValueError(
                f"this dream has lasted {self.max_frames} frames, which is the longest"
            )
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
        if checksum is not None:
            self.replayed += 1
            self.differing += checksum != session.history[-1].checksum
        self.due = max(self.due + float(1 / self.fps), self.clock()) if self.paced else 0.0
        header = {
            "action": action,
            "strategy": controls.strategy,
            "input": number,
            "steps": session.num_steps,
            "written_at": session.written_at,
            "decode_ms": milliseconds_since(started),
        }
        return partial(self._paint, tokens, self._header(session) | header)

    def _paint(self, tokens: Tensor, header: dict[str, Any]) -> Frame:
        started = time.perf_counter()
        pixels = self.world.tokenizer.decode(tokens)[0].cpu()
        header["picture_ms"] = milliseconds_since(started)
        return self._frame(pixels, header)

    def _begin(self, started: float) -> Callable[[], Frame]:
        begun = self.pending_start  # kept meanwhile: who begins anew by another seed begins here
        assert begun is not None
        self.session = None  # its memory first, and that of all who have left since
        give_back_memory()
        self.session = session = Session(self.world, begun.start)
        self.replaying, self.replayed, self.differing = deque(begun.replay), 0, 0
        self.tapped, self.due = self.idle_action, 0.0
        self.num_begun += 1
        if self.pending_start is begun:  # else the next one was asked for meanwhile
            self.pending_start = None
        header = {"begun": True, "ms": milliseconds_since(started)}
        return partial(self._frame, begun.start.frames[-1], self._header(session) | header)

    def _header(self, session: Session) -> dict[str, Any]:
        """Say what every frame does; from now on this one is under way."""
        self.sent += 1
        return {
            "frame": self.sent,
            "session_number": self.num_begun,
            "length": len(session.history),
            "seed": session.start.seed,
            "held": session.engine.num_held,
            "holds": session.engine.window,
            "replay": [self.replayed, self.replayed + len(self.replaying), self.differing],
        }

    def _frame(self, pixels: Tensor, header: dict[str, Any]) -> Frame:
        """Compress a frame, and record it if it is not where one began."""
        started = time.perf_counter()
        picture = to_jpeg(pixels)
        if "begun" not in header and self.recording and len(self.recorded) < self.max_recorded:
            self.recorded.append(picture)
        header["encode_ms"] = milliseconds_since(started)
        header |= {"recorded": len(self.recorded), "send_ms": round(self.send_ms, 2)}
        return Frame(header, picture)


def milliseconds_since(started: float) -> float:
    """Return what has passed since a reading of `time.perf_counter`, to a hundredth."""
    return round((time.perf_counter() - started) * 1e3, 2)
