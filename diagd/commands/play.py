"""Walk through a generated world in the browser.

diagd play                                  # the bundled world, on http://127.0.0.1:8421
diagd play --model PATH --device cuda
"""

import contextlib
import gc
import logging
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console

from diagd.backends.devices import DTypeName, device_of, dtype_of
from diagd.backends.prepare import Backend
from diagd.families.checkpoints import model_path
from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import MAX_MESSAGE_BYTES
from diagd.web.play.scenes import find_scenes, read_scenes
from diagd.web.play.scheduler import Hall
from diagd.web.play.server import create_app
from diagd.web.play.session import Controls, Session


@dataclass(frozen=True)
class PlayOptions:
    """Serve a page on which a world model is played, dreamt frame by frame; Ctrl-C ends it."""

    model: str = "doom"  # the bundled model, or a checkpoint folder; it must take actions
    scenes: Path | None = None  # folder of more start scenes: images, clips with jsonl actions
    context_frames: int = 4  # frames of a clip that a dream starts from
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 lets the whole network play
    port: int = 8421  # 0 takes any free one
    allow_host: tuple[str, ...] = ()  # further names by which browsers may call this server
    open: bool = True  # show the page in a browser
    max_sessions: int = 4  # pages that may play at once
    idle_seconds: float = 300.0  # a session in which nothing is pressed for so long ends
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeName = "float32"  # of the weights
    backend: Backend = "auto"  # what runs the steps; auto is native on the CPU, cuda-graph on CUDA

    def __post_init__(self) -> None:
        for name in ("context_frames", "max_sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be in [0, 65536), got {self.port}")
        if not 0 < self.idle_seconds < float("inf"):
            raise ValueError(f"idle_seconds must be above 0, got {self.idle_seconds}")
        if self.scenes is not None and not self.scenes.is_dir():
            raise FileNotFoundError(f"folder of scenes not found: {self.scenes}")


def main(options: PlayOptions) -> dict[str, Any]:
    """Serve until Ctrl-C; returns how many sessions and frames there were."""
    listening = listen(options.host, options.port)
    with listening:
        console = Console()
        with console.status("waking the model"):
            hall = make_hall(options)
        host, port = listening.getsockname()[:2]
        url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        server = make_server(hall, options)
        console.print(f"dreaming at {url} (Ctrl-C ends it)")
        if options.open:
            threading.Thread(target=_open_when_ready, args=(server, url), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt), short_collections():
            server.run(sockets=[listening])
    return {"url": url, "sessions": hall.sessions, "frames": hall.frames}


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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        ValueError: the address is not ours, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {host!r}: {error.strerror or error}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror} (another --port may be free)"
        ) from None
    return listening


def make_hall(options: PlayOptions) -> Hall:
    """Load the model and its scenes, and dream two frames so that everything is built and warm.

    Raises:
        FileNotFoundError, ValueError: something is missing, or the model cannot be played.
    """
    world = VideoGenerator.from_pretrained(
        options.model,
        device_of(options.device),
        dtype_of(options.dtype),
        options.backend,
        options.dtype == "int8",
    )
    if world.vocabulary is None:
        raise ValueError(
            f"{options.model} takes no actions, so there is nothing to play: "
            "diagd generate shows what it dreams"
        )
    # the page shows how full the context is; the engine's warnings of it would flood the terminal
    logging.getLogger("diagd.engine").setLevel(logging.ERROR)
    folder, scenes = model_path(options.model), []
    if options.scenes is not None:
        scenes = read_scenes(options.scenes, world, options.context_frames)
        if not scenes:
            raise ValueError(f"no clip or image in {options.scenes}")
    scenes += find_scenes(folder, world, options.context_frames)
    if not scenes:
        raise ValueError(f"nowhere to start: {folder} has no prompt.mp4, name a folder by --scenes")
    session = Session(world, scenes[0].start)
    for _ in range(2):
        world.tokenizer.decode(session.advance(world.vocabulary.names[0], Controls()))
    return Hall(world, scenes, options.max_sessions, options.idle_seconds)


def make_server(hall: Hall, options: PlayOptions) -> uvicorn.Server:
    """Return the server, not yet running; no message of a page may be longer than it needs."""
    hosts = (options.host, *options.allow_host)
    app = create_app(hall, Path(options.model).name, options.context_frames, hosts)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            ws="websockets-sansio",
            ws_max_size=4 * MAX_MESSAGE_BYTES,
            ws_ping_interval=20,
            ws_per_message_deflate=False,  # JPEG does not shrink
            timeout_graceful_shutdown=2,
            server_header=False,
        )
    )


def _open_when_ready(server: uvicorn.Server, url: str) -> None:
    while not (server.started or server.should_exit):
        time.sleep(0.05)
    if server.started:
        webbrowser.open(url)
