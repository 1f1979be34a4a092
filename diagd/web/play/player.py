"""A page and its session: what is pressed, what comes next, what was recorded."""

import asyncio
import ctypes
import gc
import io
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from time import monotonic, perf_counter

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diagd.data.actions import idle_action
from diagd.data.video import encode_video
from diagd.decoding.engine import Batch
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene
from diagd.web.play.messages import (
    Act,
    Adjust,
    Begin,
    Frame,
    Kept,
    PageMessage,
    Pause,
    Record,
    Seen,
    ServerMessage,
    Settings,
    Start,
    Step,
    Waiting,
)
from diagd.web.play.session import MAX_FRAMES, Controls, Session, SessionLog

WINDOW = 2  # frames under way to the page
MAX_STEPS = 16  # asked for and not yet begun
MAX_RECORDED_FRAMES = 1200
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Note:
    """A message for the page, with the picture that a header has; a `code` closes the socket."""

    message: ServerMessage
    code: int | None = None
    picture: bytes = b""


class Keys:
    """The pressed action, and the newest tap: a key released before any frame could see it."""

    def __init__(self, idle: str) -> None:
        self.idle = idle
        self.pressed = self._held = Act(idle, 0)  # now, and when a frame was last read
        self.tapped: Act | None = None
        self._lock = threading.Lock()  # the model's thread reads what the event loop presses

    def press(self, act: Act) -> None:
        with self._lock:
            last = self.pressed
            before, now = (set(one.action.split("+")) for one in (last, act))
            was_let_go = act.action in (self.idle, self._held.action) or now < before
            if was_let_go and last is not self._held and last.action != self.idle:
                self.tapped = last
            self.pressed = act

    def next(self) -> Act:
        """Return the action of the next frame: a tap, once, or else the pressed one."""
        with self._lock:
            if self.tapped is None:
                self._held = self.pressed
                return self.pressed
            tapped, self.tapped = self.tapped, None
            return tapped


class Player:
    """A page and its session, at the world's own pace of `fps` where the page wants that."""

    def __init__(
        self, world: VideoGenerator, scenes: Sequence[StartScene], controls: Controls | None
    ) -> None:
        assert world.vocabulary is not None
        self.world, self.scenes, self.fps = world, scenes, scenes[0].fps
        self.id = secrets.token_urlsafe(16)  # who knows it may fetch the recording and the session
        self.outbox: asyncio.Queue[Note] = asyncio.Queue()
        self.before: int | None = None  # players in line before this one, while it waits
        self.controls, self.paced, self.paused = controls or Controls(), False, False
        self.lossless = False
        self.keys = Keys(idle_action(world.vocabulary))
        self.steps = deque[Act]()  # each is a frame, the oldest the next one
        self.received = 0  # the newest id read
        self.session: Session | None = None
        self.pending: SessionLog | None = None  # begins at the next turn
        self.past: SessionLog | None = None  # of a player who left
        self.differing = 0  # frames of a replay that came out otherwise
        self.recording, self.recorded = False, list[bytes]()
        self.uploading = False  # a player has one upload at a time
        self.is_acting = False  # whether a frame is being written
        self.sent = self.seen = self.num_begun = 0  # frames, frames, and sessions
        self.due = self.send_ms = 0.0
        self.busy = 0.0  # the model's seconds given to this player
        self.turn_seconds = 0.0  # in the last turn
        self.last_active = monotonic()  # when it last asked for something, held a key, or left

    def wait(self, before: int, num_places: int) -> None:
        if before == self.before:
            return
        self.before = before
        taken = f"All {num_places} places are taken" if num_places > 1 else "The place is taken"
        turn = f"{before} before you" if before else "you are next"
        self.outbox.put_nowait(Note(Waiting(before, f"{taken}: {turn}.")))

    def release(self) -> None:
        """Free the session's memory; its recording and its log can still be fetched."""
        if self.session is not None:
            self.past = self.session.log
        self.session = self.pending = None

    def handle(self, message: PageMessage) -> None:
        """Handle a message; ValueError for a frame that was never sent, or no scene."""
        if not isinstance(message, Seen):
            self.last_active = monotonic()
        match message:
            case Act():
                self.keys.press(message)
                self.received = message.id
            case Step(action, number):
                if len(self.steps) >= MAX_STEPS:
                    raise ValueError(f"at most {MAX_STEPS} steps may wait for their frames")
                self.steps.append(Act(action, number))
                self.received = number
            case Adjust():
                self._adjust(message)
            case Begin(scene, seed):
                if scene is None:  # another seed of what is about to begin, or has begun
                    begun = self.pending or (self.session and self.session.start) or self.scenes[0]
                elif 0 <= scene < len(self.scenes):
                    begun = self.scenes[scene]
                else:
                    raise ValueError(f"scene must be in [0, {len(self.scenes)}), got {scene}")
                self.begin(SessionLog(begun.frames, begun.actions, seed, name=begun.name))
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

    def _adjust(self, asked: Adjust) -> None:
        controls = Controls(asked.strategy, asked.temperature, asked.top_p)
        try:
            self.world.check(controls.strategy, controls.sampling(self.world))
        except ValueError as error:
            if self.outbox.qsize() <= WINDOW:  # to who never listens, no more is said
                settings = Settings(**vars(self.controls), paced=self.paced, lossless=self.lossless)
                self.outbox.put_nowait(Note(Kept(f"That does not fit: {error}.", settings)))
        else:
            self.controls, self.paced, self.lossless = controls, asked.paced, asked.lossless

    def begin(self, log: SessionLog) -> None:
        """Begin another session at the next turn, and first generate the frames it has again."""
        self.pending, self.last_active = log, monotonic()
        self.steps = deque()  # another one: the model's thread may be at the last

    def ready(self, now: float) -> bool:
        if self.sent - self.seen >= WINDOW:
            return False
        if self.pending is not None or self.session is None:
            return self.pending is not None
        is_asked = self.session.expected is not None or bool(self.steps)
        return is_asked or (not self.paused and now >= self.due)

    def make_room(self) -> None:
        """Free, where a dream begins, the memory of the last and of all who have left since.

        Short visits left a server with three times the memory it began with, none of it in use.
        """
        if self.pending is not None:
            self.session = None
            gc.collect()  # a session holds itself in circles; fast under `short_collections`
            if _TRIM is not None:  # only glibc keeps pages between two pieces still in use
                _TRIM(ctypes.c_size_t(0))

    def turn(self) -> Callable[[], Note]:
        """Begin the pending session, or generate one frame. Runs in the model's thread.

        Returns a function that paints the frame; to be called once, in the order of turns.
        """
        end = self.act()
        while not self.is_done:
            assert self.session is not None
            self.session.stream.batch.step()
        return end()

    def act(self, batch: Batch | None = None) -> Callable[[], Callable[[], Note]]:
        """Begin a turn, whose frame the steps of the session's batch then write.

        Returns a function that ends it, once `is_done`, and returns what paints the frame.
        """
        started = perf_counter()
        if (log := self.pending) is not None:
            session, self.is_acting = self._begin(log, batch), False
            return lambda: self._end(session, log.frames[-1], Start, started)
        session = self.session
        assert session is not None
        finish, self.is_acting = self._advance(session), True
        return lambda: self._end(session, *finish(), started)

    @property
    def is_done(self) -> bool:
        return not self.is_acting or self.session is None or self.session.is_whole

    def _end(
        self, session: Session, drawn: Tensor, kind: Callable[..., Start | Frame], started: float
    ) -> Callable[[], Note]:
        self.sent += 1
        length, replayed = len(session.history), len(session.start.history)
        header = kind(
            frame=self.sent,
            session_number=self.num_begun,
            length=length,
            seed=session.start.seed,
            held=session.stream.num_held,
            holds=session.stream.window,
            replay=(min(length, replayed), replayed, self.differing),
            decode_ms=milliseconds_since(started),
        )
        return lambda: self._paint(drawn, header)

    def _begin(self, log: SessionLog, batch: Batch | None) -> Session:
        if self.session is not None and batch is not None:
            self.session.stream.close()
            self.session = None
        # pending until then: see `handle`
        self.session = session = Session(self.world, log, batch)
        self.keys.tapped, self.due, self.differing = None, 0.0, 0
        self.num_begun += 1
        if self.pending is log:  # else the next one was asked for meanwhile
            self.pending = None
        return session

    def _advance(self, session: Session) -> Callable[[], tuple[Tensor, Callable[..., Frame]]]:
        expected = session.expected
        if expected or self.keys.pressed.action != self.keys.idle:
            self.last_active = monotonic()
        if len(session.history) >= MAX_FRAMES:
            raise ValueError(f"this dream has lasted {MAX_FRAMES} frames, which is the longest")
        if expected:
            act, controls = Act(expected.action, self.keys.pressed.id), expected.controls
        else:
            steps, controls = self.steps, self.controls
            act = steps.popleft() if steps else self.keys.next()
        session.begin(act.action, controls)

        def finish() -> tuple[Tensor, Callable[..., Frame]]:
            tokens = session.finish()
            if expected:
                self.differing += expected.checksum not in (None, session.history[-1].checksum)
            self.due = max(self.due + float(1 / self.fps), monotonic()) if self.paced else 0.0
            return tokens, partial(
                Frame,
                action=act.action,
                input=act.id,
                strategy=controls.strategy.name,
                steps=session.num_steps,
                written_at=session.written_at,
            )

        return finish

    def _paint(self, drawn: Tensor, header: Start | Frame) -> Note:
        """Compress the frame where one began, or that of tokens, which is also recorded."""
        started = perf_counter()
        if is_new := isinstance(header, Frame):
            drawn = self.world.tokenizer.decode(drawn)[0].cpu()
            header = replace(header, picture_ms=milliseconds_since(started))
        started = perf_counter()
        picture = to_png(drawn) if self.lossless else to_jpeg(drawn)
        if is_new and self.recording and len(self.recorded) < MAX_RECORDED_FRAMES:
            self.recorded.append(picture)
        header = replace(
            header,
            encode_ms=milliseconds_since(started),
            send_ms=round(self.send_ms, 2),
            recorded=len(self.recorded) if self.recording else 0,
            received=self.received,
        )
        return Note(header, picture=picture)


def milliseconds_since(started: float) -> float:
    return round((perf_counter() - started) * 1e3, 2)


def to_jpeg(frame: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "JPEG", quality=92, subsampling=0)
    return buffer.getvalue()


def to_png(frame: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def from_picture(picture: bytes) -> Tensor:
    """Decode a picture of `to_jpeg` or `to_png`; only for pictures that we made."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture))))


def to_mp4(pictures: Sequence[bytes], fps: Fraction) -> bytes:
    return encode_video(torch.stack([from_picture(picture) for picture in pictures]), fps)
