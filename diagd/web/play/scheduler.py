"""Everybody who plays, and the one model they share.

The model lives in a thread of its own; the event loop only chooses whose turn it is. Turns are
fair in time: a player who decodes in raster order waits longer between frames, and slows nobody
else more than by the turn under way (start-time fair queueing).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import Begin, Message
from diagd.web.play.player import Frame, Note, Player
from diagd.web.play.saved import SavedDream
from diagd.web.play.scenes import Scene
from diagd.web.play.session import Start

logger = logging.getLogger("diagd.play")
GONE, TRY_LATER, WRONG, CRASHED = 1000, 1013, 1008, 1011  # codes that close a socket


class Hall:
    """The players, by id, and the scheduler of their turns.

    Attributes:
        frames: dreamt for anybody so far. sessions: begun so far.
    """

    def __init__(
        self,
        world: VideoGenerator,
        scenes: Sequence[Scene],
        max_sessions: int,
        idle_seconds: float,
    ) -> None:
        self.world, self.scenes = world, tuple(scenes)
        self.max_sessions, self.idle_seconds = max_sessions, idle_seconds
        self.players: dict[str, Player] = {}
        self.frames = self.sessions = 0
        self.clock = 0.0  # the model's seconds that the least served of the waiting has had
        self.wake = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def join(self) -> Player | None:
        """Let a player in, unless the hall is full; the first scene is what it begins with."""
        if len(self.players) >= self.max_sessions:
            return None
        player = Player(self.world, self.scenes[0].fps)
        self.players[player.id] = player
        self.sessions += 1
        return player

    def leave(self, player: Player) -> None:
        """Let a player go; the dream's memory goes with it (after a turn that is under way)."""
        self.players.pop(player.id, None)

    def take(self, player: Player, message: Message) -> None:
        """Follow a player's message.

        Raises:
            ValueError: a message that makes no sense here.
        """
        if isinstance(message, Begin):
            player.begin(SavedDream(self._start(player, message), ()))
        else:
            player.take(message)
        self.wake.set()

    def begin(self, player: Player, dream: SavedDream) -> None:
        """Start a player's dream from an upload, or replay a saved one."""
        player.begin(dream)
        self.wake.set()

    def _start(self, player: Player, message: Begin) -> Start:
        if message.scene is None:
            old = player.wish.start if player.wish else player.session and player.session.start
            old = old or self.scenes[0].start
        elif 0 <= message.scene < len(self.scenes):
            old = self.scenes[message.scene].start
        else:
            raise ValueError(f"scene must be in [0, {len(self.scenes)}), got {message.scene}")
        return Start(old.frames, old.actions, message.seed)

    async def run(self) -> None:
        """Serve turns until cancelled."""
        loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._end_idle())
        try:
            while True:
                now = time.monotonic()
                ready = [player for player in self.players.values() if player.ready(now)]
                if not ready:
                    await self._wait(now)
                    continue
                player = min(ready, key=lambda player: max(player.busy, self.clock))
                turn = loop.run_in_executor(self.thread, player.turn)
                await asyncio.wait([turn])
                self.clock = max(player.busy, self.clock)
                player.busy = self.clock + time.monotonic() - now
                self._deliver(player, turn)
                # the least recently served comes first among equals
                if self.players.pop(player.id, None):
                    self.players[player.id] = player
        finally:
            watch.cancel()
            self.thread.shutdown(wait=True)

    def _deliver(self, player: Player, turn: asyncio.Future[Frame]) -> None:
        error = turn.exception()
        if error is None:
            self.frames += "begun" not in turn.result().header
            player.outbox.put_nowait(turn.result())
            return
        if isinstance(
            error, ValueError
        ):  # a start or an end that the player can do something about
            self.end(player, f"The dream ended: {error}.", CRASHED)
            return
        logger.error("a session crashed", exc_info=error)
        self.end(player, f"Decoding crashed ({type(error).__name__}): this dream is over.", CRASHED)

    def end(self, player: Player, message: str, code: int = GONE) -> None:
        """Say why, and close the player's socket."""
        self.leave(player)
        player.session = None
        player.outbox.put_nowait(Note({"type": "ended", "message": message}, code))

    async def _wait(self, now: float) -> None:
        """Sleep until somebody wants something, or a frame that was put off is due."""
        self.wake.clear()
        due = [player.due - now for player in self.players.values() if player.due > now]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), min(due, default=None))

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.idle_seconds / 4))
            now = time.monotonic()
            for player in list(self.players.values()):
                if now - player.last_active > self.idle_seconds:
                    self.end(
                        player,
                        f"Nothing was pressed for {self.idle_seconds:g} seconds, so this dream "
                        "ended and gave its memory back.",
                    )
