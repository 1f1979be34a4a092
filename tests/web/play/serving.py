"""Start `diagd play` in a thread, and talk to it as a page does."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from websockets.sync.client import ClientConnection, connect

from diagd.client import unpack
from diagd.web.guard import listen
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.server import PlayOptions, load

ALIVE = '{"type":"alive"}'
PATIENCE = 60.0  # seconds; machines of tests are slow at times, and nobody waits for so long


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    scheduler: Scheduler
    server: uvicorn.Server
    port: int
    host: str = "127.0.0.1"  # as it stands in an address

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @contextlib.contextmanager
    def page(self, **options: Any) -> Iterator["Page"]:
        """Open a socket as the page does."""
        with connect(f"ws://{self.address}/play", max_size=None, **options) as line:
            yield Page(line)


class Page:
    """A page without a browser: sends messages, draws (and acknowledges) frames."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.welcome = self.receive()

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def receive(self) -> Any:
        """Return the next JSON message, or (header, picture) of the next frame."""
        while (message := self.socket.recv(timeout=PATIENCE)) == ALIVE:
            pass
        return json.loads(message) if isinstance(message, str) else unpack(message)

    def frame(self, seen: bool = True) -> tuple[dict[str, Any], bytes]:
        """Return the next frame, and say that it has been drawn."""
        received = self.receive()
        assert isinstance(received, tuple), received
        if seen:
            self.send("seen", frame=received[0]["frame"])
        return received

    def frames(self, count: int) -> list[dict[str, Any]]:
        """Return the headers of the next generated frames; the start picture is passed over."""
        headers: list[dict[str, Any]] = []
        while len(headers) < count:
            header, _ = self.frame()
            headers += [] if "begun" in header else [header]
        return headers

    def last_words(self) -> str:
        """Read on until the server says why it closes the socket."""
        while True:
            message = self.receive()
            if isinstance(message, dict):
                return message["message"]


@contextlib.contextmanager
def serving(model: Path, port: int = 0, **options: Any) -> Iterator[Served]:
    """Run a server until the block ends."""
    settings: dict[str, Any] = {"dtype": "float32", **options}
    record = PlayOptions(model=str(model), port=port, open=False, **settings)
    listening = listen(record.host, record.port)
    scheduler, server = load(record)
    with in_a_thread(server, listening):
        name = f"[{record.host}]" if ":" in record.host else record.host
        yield Served(scheduler, server, listening.getsockname()[1], name)


@contextlib.contextmanager
def in_a_thread(server: uvicorn.Server, listening: socket.socket) -> Iterator[None]:
    """Run a server, of a socket that ends with it."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def drawn(page: Any) -> int:
    """Return how many frames a page of a browser has drawn."""
    return int(page.get_attribute("body", "data-frames") or 0)


def wait_for_frames(page: Any, count: int) -> None:
    """Wait until a page of a browser has drawn so many more frames."""
    goal = drawn(page) + count
    try:
        wait_until(lambda: drawn(page) >= goal)
    except AssertionError:
        pytest.fail(f"{drawn(page)} of {goal} frames: {page.inner_text('body')}")
