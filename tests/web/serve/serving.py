"""Start `diagd serve` in a thread, and talk to it as programs do."""

import contextlib
import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from openai import OpenAI
from PIL import Image
from torch import Tensor

from diagd.web.guard import listen
from diagd.web.serve.scheduler import Scheduler
from diagd.web.serve.server import ServeOptions, ServeServer
from diagd.web.serve.service import Service
from tests.web.play.serving import in_a_thread, wait_until

IMAGES = "/v1/images/generations"


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    server: ServeServer
    url: str
    opened: contextlib.ExitStack  # clients, which end with it

    def client(self, **options: Any) -> OpenAI:
        settings = {"api_key": "unused", "max_retries": 0, **options}
        return self.opened.enter_context(OpenAI(base_url=f"{self.url}/v1", **settings))

    def post(self, path: str = IMAGES, **request: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **request)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    @property
    def service(self) -> Service:
        assert isinstance(self.server.service, Service)
        return self.server.service

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.service.scheduler
        assert scheduler is not None
        return scheduler

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Have the model's thread do nothing."""
        begun, released = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            released.wait(60)

        self.service.thread.submit(hold)
        begun.wait(60)
        try:
            yield
        finally:
            released.set()


@contextlib.contextmanager
def serving(model: Path, loads: bool = True, **options: Any) -> Iterator[Served]:
    """Run a server until the block ends, until then without a model if it never `loads`."""
    settings: dict[str, Any] = {"dtype": "float32", "port": 0, **options}
    record = ServeOptions(model=str(model), **settings)
    listening = listen(record.host, record.port)
    server = ServeServer(record)
    released = threading.Event()
    if not loads:
        assert isinstance(server.service, Service)
        server.service.thread.submit(released.wait, 60)
    with in_a_thread(server, listening), contextlib.ExitStack() as opened:
        opened.callback(released.set)
        if loads:
            wait_until(lambda: server.gate.state == "ready")
        yield Served(server, f"http://127.0.0.1:{listening.getsockname()[1]}", opened)


def pixels_of(data: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))
