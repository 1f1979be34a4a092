"""Walk through a generated world in the browser: a warm world, and the app over it.

diagd play                      # the bundled world, on http://127.0.0.1:8421
diagd play --model PATH --device cuda
"""

import asyncio
import gc
import logging
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from diagd.backends.devices import device_of
from diagd.console import make_console, waiting
from diagd.files import write_bytes
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene
from diagd.web.guard import listen, server_config, url_of
from diagd.web.play.app import create_app
from diagd.web.play.export import pack
from diagd.web.play.messages import MAX_MESSAGE_BYTES
from diagd.web.play.options import PlayOptions
from diagd.web.play.player import to_mp4
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.session import Controls, Session, SessionLog
from diagd.web.play.welcome import opening

logger = logging.getLogger("diagd.play")


def play(options: PlayOptions) -> dict[str, Any]:
    """Serve until Ctrl-C; returns how many sessions and frames there were."""
    with listen(options.host, options.port) as listening:
        with waiting("waking the model"):
            scheduler, server = load(options)
        url = url_of(*listening.getsockname()[:2])
        make_console().print(f"dreaming at {url} in {scheduler.world.dtype} (Ctrl-C ends it)")
        if options.open:  # the socket listens already: a page waits until the server runs
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        with suppress(KeyboardInterrupt), short_collections():
            server.run(sockets=[listening])
    return {"url": url, "sessions": scheduler.sessions, "frames": scheduler.frames}


def load(options: PlayOptions) -> tuple[Scheduler, uvicorn.Server]:
    """Load the model and its scenes, warm it up, and return the server, not yet running."""
    device = device_of(options.device)
    world = VideoGenerator.from_pretrained(options.model, device, options.dtype, options.backend)
    world.remembers = options.remember or world.remembers
    if world.vocabulary is None or not world.defaults.context_frames:
        kind = "takes no actions" if world.vocabulary is None else "makes single images"
        raise ValueError(
            f"{options.model} {kind}, so there is nothing to play: "
            "diagd generate shows what it dreams"
        )
    controls, context_frames, scenes = opening(world, options)
    warm_up(world, scenes[0], controls)
    scheduler = Scheduler(world, scenes, options.max_sessions, options.idle_seconds, controls)
    packed = partial(pack, replace(options, strategy=None, context_frames=context_frames))
    config = server_config(
        create_app(scheduler, context_frames, packed),
        (options.host, *options.allow_host),
        ws="websockets-sansio",
        ws_max_size=4 * MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # JPEG does not shrink
        timeout_graceful_shutdown=2,
    )
    return scheduler, PlayServer(config, scheduler, options.recordings)


def warm_up(world: VideoGenerator, scene: StartScene, controls: Controls) -> None:
    """Generate two frames, so that everything is built before the first player comes."""
    assert world.vocabulary is not None
    session = Session(world, SessionLog(scene.frames, scene.actions, 0))
    for _ in range(2):
        world.tokenizer.decode(session.advance(world.vocabulary.names[0], controls))


class PlayServer(uvicorn.Server):
    """Saves what is being recorded, in a folder, when it is told to end (SIGTERM, Ctrl-C)."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, recordings: Path) -> None:
        super().__init__(config)
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


@contextmanager
def short_collections() -> Iterator[None]:
    """Exempt all objects made before from Python's collections, which took 0.2 s of a turn."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left: a full collection is due when that has grown by a quarter
    try:
        yield
    finally:
        gc.unfreeze()
