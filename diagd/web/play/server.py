"""The server of `diagd play`: a warm world, and the app over it behind uvicorn."""

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from diagd.files import write_bytes
from diagd.pipeline.generator import StartScene, VideoGenerator
from diagd.web.guard import Guard, PatientProtocol
from diagd.web.play.messages import MAX_MESSAGE_BYTES
from diagd.web.play.player import to_mp4
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.session import Controls, Session, SessionStart

logger = logging.getLogger("diagd.play")


def warm_up(world: VideoGenerator, scene: StartScene, controls: Controls) -> None:
    """Generate two frames, so that everything is built before the first player comes."""
    assert world.vocabulary is not None
    session = Session(world, SessionStart(scene.frames, scene.actions, 0))
    for _ in range(2):
        world.tokenizer.decode(session.advance(world.vocabulary.names[0], controls))


class PlayServer(uvicorn.Server):
    """Saves what is being recorded, in a folder, when it is told to end (SIGTERM, Ctrl-C)."""

    def __init__(self, app: Guard, scheduler: Scheduler, recordings: Path) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                http=PatientProtocol,
                ws="websockets-sansio",
                ws_max_size=4 * MAX_MESSAGE_BYTES,
                ws_ping_interval=20,
                ws_per_message_deflate=False,  # JPEG does not shrink
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        self.scheduler, self.recordings = scheduler, recordings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all sessions, then write the recordings that were under way."""
        players = self.scheduler.players.values()
        cut = [(one.recorded, one.fps) for one in players if one.recording and one.recorded]
        await super().shutdown(sockets)
        for number, (pictures, fps) in enumerate(cut, start=1):
            path = self.recordings / f"dream-{time.strftime('%Y%m%d-%H%M%S')}-{number}.mp4"
            try:
                write_bytes(path, await asyncio.to_thread(to_mp4, pictures, fps))
            except OSError as error:
                logger.error("a recording of %d frames is lost: %s", len(pictures), error)
            else:
                logger.warning("a recording was cut short: %s", path)


def run(server: uvicorn.Server, listening: socket.socket, page: str | None = None) -> None:
    """Serve until Ctrl-C, and show a page in a browser as soon as it is there."""
    if page is not None:
        threading.Thread(target=_open_when_ready, args=(server, page), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt), short_collections():
        server.run(sockets=[listening])


def _open_when_ready(server: uvicorn.Server, page: str) -> None:
    while not (server.started or server.should_exit):
        time.sleep(0.05)
    if server.started:
        webbrowser.open(page)


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Exempt all objects made before from Python's collections, which took 0.2 s of a turn."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left: a full collection is due when that has grown by a quarter
    try:
        yield
    finally:
        gc.unfreeze()
