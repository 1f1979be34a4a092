"""The order of turns: players share one model fairly, and wait in line for a place."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic, thread_time
from typing import Any

from diagd.decoding.engine import Batch
from diagd.decoding.strategies.table import Exact
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene
from diagd.web.model_thread import Painter, tried
from diagd.web.play.messages import Alive, Begin, Ended, Frame, PageMessage, Welcome
from diagd.web.play.player import MAX_RECORDED_FRAMES, Note, Player
from diagd.web.play.session import Controls, SessionLog
from diagd.web.play.welcome import describe, offered
from diagd.web.uploads import MAX_UPLOAD_BYTES

logger = logging.getLogger("diagd.play")
GONE, TRY_LATER, WRONG, CRASHED = 1000, 1013, 1008, 1011  # codes that close a socket
MAX_WAITING = 32
KEPT_SECONDS = 300.0
ALIVE_SECONDS = 5.0  # pages give up after four times as long without a word (connection.js)


@dataclass(eq=False)
class Scheduler:
    """The players of a world, who begin at the first of the scenes, with the same controls."""

    world: VideoGenerator
    scenes: Sequence[StartScene]
    max_sessions: int  # the others wait in line
    idle_seconds: float  # a session without a message or a held key for so long is ended
    controls: Controls | None = None
    batch: Batch | None = None  # whose steps players share; None: they take turns

    def __post_init__(self) -> None:
        self.players: dict[str, Player] = {}  # the least recently served first
        self.gone: dict[str, Player] = {}  # their recordings and logs can be fetched for a while
        self.line: list[Player] = []  # who waits for a place, the first to come first
        self.served: list[Player] = []  # whose turns are under way
        self.acting: dict[Player, Callable[[], Callable[[], Note]]] = {}  # what ends their frames
        self.frames = self.sessions = 0  # generated, and begun, for anybody so far
        self.virtual_time = 0.0  # model seconds of the least served of those who wait for a turn
        self.wake = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.painter = Painter(self.world.model, self.thread)

    @property
    def computed(self) -> str:
        return self.world.dtype

    def join(self) -> Player | None:
        """Admit a player at once or put them in line; None where the line is full."""
        if len(self.line) >= MAX_WAITING:
            return None
        player = Player(self.world, self.scenes, self.controls)
        self.line.append(player)
        self._admit()
        return player

    def _admit(self) -> None:
        while self.line and len(self.players) < self.max_sessions:
            player = self.line.pop(0)
            self.players[player.id] = player
            self.sessions += 1
            player.outbox.put_nowait(Note(self._welcome(player)))
            self.handle(player, Begin(0, secrets.randbelow(2**20)))
        for before, player in enumerate(self.line):
            player.wait(before, self.max_sessions)

    def _welcome(self, player: Player) -> Welcome:
        raster, *diagonals = offered(self.world)
        strategies = dict.fromkeys([raster, Exact(), *diagonals, player.controls.strategy])
        return Welcome(
            **vars(describe(self.world, self.scenes, strategies, player.controls)),
            session=player.id,
            computed=(self.world.dtype, self.world.backend),
            max_recorded=MAX_RECORDED_FRAMES,
            max_upload_bytes=MAX_UPLOAD_BYTES,
        )

    def leave(self, player: Player) -> None:
        """Remove a player and free the session's memory (after a turn that is under way)."""
        if self.players.pop(player.id, None):
            self.gone[player.id], player.last_active = player, monotonic()
            while len(self.gone) > self.max_sessions:
                del self.gone[next(iter(self.gone))]
        if player not in self.served:
            self._release(player)  # Python may be slow to see that nobody needs the player
        if player in self.line:
            self.line.remove(player)
        self._admit()

    def end(self, player: Player, message: str, code: int = GONE) -> None:
        self.leave(player)
        player.outbox.put_nowait(Note(Ended(message), code))

    def handle(self, player: Player, message: PageMessage) -> None:
        """Handle a player's message, or raise ValueError where it makes no sense here."""
        if player in self.line:
            raise ValueError("nothing can be played before there is a place")
        player.handle(message)
        self.wake.set()

    def begin(self, player: Player, log: SessionLog) -> None:
        player.begin(log)
        self.wake.set()

    async def run(self) -> None:
        watch = asyncio.create_task(self._watch_idle())
        try:
            while True:
                now = monotonic()
                if (player := self.next_player(now)) is None:
                    self.wake.clear()
                    due = [one.due - now for one in self.players.values() if one.due > now]
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.wake.wait(), min(due, default=None))
                    continue
                self.served = [player] if self.batch is None else self._ready(now)
                loop = asyncio.get_running_loop()
                turns = await loop.run_in_executor(self.thread, self._turn)
                served, self.served = self.served, []
                for player in served:
                    self.charge(player, player.turn_seconds)
                for player, outcome in turns.items():
                    if isinstance(outcome, Exception):
                        self._fail(player, outcome)
                    else:
                        painting = self.painter.submit(outcome)
                        painting.add_done_callback(partial(self._deliver, player))
                for player in served:
                    if player.id not in self.players:
                        self._release(player)
        finally:
            watch.cancel()
            self.thread.shutdown(wait=True)
            self.painter.thread.shutdown(wait=True)

    def _turn(self) -> dict[Player, Callable[[], Note] | Exception]:
        """Take a turn, or steps until a frame is whole; return what paints it, or went wrong."""
        if self.batch is None:
            (player,) = self.served
            return {player: tried(partial(_timed, player))}
        ended, started = dict[Player, Callable[[], Note] | Exception](), thread_time()
        for player in [one for one in self.served if one not in self.acting]:
            end = tried(partial(player.act, self.batch))
            if isinstance(end, Exception):
                ended[player] = end
            else:
                self.acting[player] = end
        failed = tried(partial(self._step_until_one_is_done, self.batch))
        if failed is not None:  # in the step that all share
            ended |= dict.fromkeys(self.acting, failed)
        for player in [one for one in self.acting if one.is_done or one in ended]:
            end = self.acting.pop(player)
            if player not in ended:
                ended[player] = tried(end)
        for player in self.served:
            player.turn_seconds = (thread_time() - started) / len(self.served)
        return ended

    def _step_until_one_is_done(self, batch: Batch) -> None:
        while self.acting and not any(player.is_done for player in self.acting):
            batch.step()

    def _ready(self, now: float) -> list[Player]:
        return [one for one in self.players.values() if one in self.acting or one.ready(now)]

    def _release(self, player: Player) -> None:
        self.acting.pop(player, None)
        if self.batch is not None and player.session is not None:
            player.session.stream.close()
        player.release()

    def next_player(self, now: float) -> Player | None:
        """Choose the player, of those that are ready, with the smallest share of model time."""
        return min(self._ready(now), key=lambda p: max(p.busy, self.virtual_time), default=None)

    def charge(self, player: Player, seconds: float) -> None:
        """Count a turn's seconds; among equals the least recently served comes first."""
        self.virtual_time = max(player.busy, self.virtual_time)
        player.busy = self.virtual_time + seconds
        if self.players.pop(player.id, None):
            self.players[player.id] = player

    def _deliver(self, player: Player, work: asyncio.Future[Any]) -> None:
        if (error := work.exception()) is not None:
            self._fail(player, error)
            return
        note: Note = work.result()
        self.frames += isinstance(note.message, Frame)
        player.outbox.put_nowait(note)

    def _fail(self, player: Player, error: BaseException) -> None:
        if isinstance(error, ValueError):  # a start or an end that the player can change
            self.end(player, f"The dream ended: {error}.", CRASHED)
        else:
            logger.error("a session crashed", exc_info=error)
            message = f"Decoding crashed ({type(error).__name__}): this dream is over."
            self.end(player, message, CRASHED)

    async def _watch_idle(self) -> None:
        told = monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.idle_seconds / 4, ALIVE_SECONDS))
            self.end_idle()
            if monotonic() - told >= ALIVE_SECONDS:
                told = monotonic()
                for player in (*self.players.values(), *self.line):
                    if player.outbox.empty():  # else something else is under way
                        player.outbox.put_nowait(Note(Alive()))

    def end_idle(self) -> None:
        """End sessions without activity for `idle_seconds`; forget players who left long ago."""
        now = monotonic()
        kept = [one for one in self.gone.values() if now - one.last_active <= KEPT_SECONDS]
        self.gone = {player.id: player for player in kept}
        passed = f"Nothing was pressed for {self.idle_seconds:g} seconds"
        for player in list(self.players.values()):
            if now - player.last_active > self.idle_seconds:
                self.end(player, f"{passed}, so this dream ended and gave its memory back.")


def _timed(player: Player) -> Callable[[], Note]:
    player.make_room()  # not charged, nor is a machine that stalls: neither is the player's doing
    started = thread_time()
    try:
        return player.turn()
    finally:
        player.turn_seconds = thread_time() - started
