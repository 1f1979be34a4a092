"""The server of `diagd play`: a world warmed up, and the app over it behind uvicorn."""

import contextlib
import gc
import socket
import threading
import time
import webbrowser
from collections.abc import Collection, Iterator

import uvicorn

from diagd.pipeline.generator import VideoGenerator
from diagd.web.connections import PatientProtocol
from diagd.web.play.app import create_app
from diagd.web.play.messages import MAX_MESSAGE_BYTES
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.session import Controls, Session, SessionStart


def warm_up(world: VideoGenerator, start: SessionStart) -> None:
    """Generate two frames, so that everything is built before the first player comes."""
    assert world.vocabulary is not None
    session = Session(world, start)
    for _ in range(2):
        world.tokenizer.decode(session.advance(world.vocabulary.names[0], Controls()))


def make_server(
    scheduler: Scheduler, model: str, context_frames: int, hosts: Collection[str]
) -> uvicorn.Server:
    """Return the server, not yet running; no message of a page may be longer than it needs.

    Args:
        (all): as in `create_app`.
    """
    return uvicorn.Server(
        uvicorn.Config(
            create_app(scheduler, model, context_frames, hosts),
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


def run(server: uvicorn.Server, listening: socket.socket, page: str | None = None) -> None:
    """Serve until Ctrl-C.

    Args:
        page: an address to show in a browser as soon as it is there.
    """
    if page is not None:
        threading.Thread(target=_open_when_ready, args=(server, page), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt), short_collections():
        server.run(sockets=[listening])


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keep Python's collector from looking through all that was made before.

    A full collection took 0.2 s, in the middle of the turn of a player who then had to wait for the
    others to catch up. Looking only at what playing makes took a tenth.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _open_when_ready(server: uvicorn.Server, page: str) -> None:
    while not (server.started or server.should_exit):
        time.sleep(0.05)
    if server.started:
        webbrowser.open(page)
