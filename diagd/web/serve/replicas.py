"""Replicas: several processes with the model behind one server, under Ray Serve.

The server checks keys and sizes, and forwards whole requests; a replica answers them with the same
routes. When a replica dies, requests whose clients have received nothing yet are sent to another
one, and Ray Serve restarts it.
"""

import asyncio
import logging
import math
import signal
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diagd.extras import require
from diagd.web.guard import read_body
from diagd.web.serve.errors import ApiError, handle_errors
from diagd.web.serve.events import ACCEPTED, error_event
from diagd.web.serve.gate import NOTES
from diagd.web.serve.options import ServeOptions
from diagd.web.serve.service import MAX_CLIP_BYTES, Service
from diagd.web.uploads import MAX_SECONDS_OF_UPLOAD
from diagd.workers import check_resources, start_ray, stop_ray

logger = logging.getLogger("diagd.serve")
NAME = "diagd"
TRIES = 3
# the parts of a scope that a replica needs, which can be pickled
KEPT = "type asgi http_version method scheme path raw_path query_string root_path headers client"


class Replica:
    """A process with the model, which answers requests."""

    async def __init__(self, options: ServeOptions) -> None:
        torch.set_num_threads(max(1, math.ceil(options.replica_cpus)))
        service, self.app = Service(options), FastAPI(openapi_url=None)
        handle_errors(self.app)
        service.add_routes(self.app)
        await service.start()
        self.running = asyncio.create_task(service.run())

    def check_health(self) -> None:
        if self.running.done():
            raise RuntimeError("the scheduler has stopped")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Answer a request; closing the generator means that the client disconnected."""
        messages, gone = asyncio.Queue[Message | None](), asyncio.Event()
        waiting = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(self.app(scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
        await answering


class Replicas:
    """The replicas, from start to shutdown."""

    def __init__(self, options: ServeOptions) -> None:
        require("--replicas", "ray")
        self.options = options
        self.handle: Any = None

    async def start(self) -> None:
        """Start the replicas and wait for their models; ValueError if that fails."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.handle = await asyncio.to_thread(_deploy, self.options)
        for number, handler in handlers.items():  # Ray has replaced them
            signal.signal(number, handler)

    async def run(self) -> None:
        """Ray Serve runs everything."""
        await asyncio.Event().wait()

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes that replicas answer to an app that handles `ApiError`."""

        async def forward(request: Request) -> Response:
            return Forwarded(self, await read_body(request, MAX_CLIP_BYTES, MAX_SECONDS_OF_UPLOAD))

        for path in ("/v1/images/generations", "/v1/videos/continuations"):
            app.post(path)(forward)

    def close(self) -> None:
        if self.handle is not None:
            stop_ray()


def _deploy(options: ServeOptions) -> Any:
    """Start replicas, and return a handle whose answers are streams of messages."""
    ray = start_ray(options.address)
    try:
        from ray import serve  # slow to import, and one process does not need it
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise ValueError(f"--replicas needs Ray Serve: {error}") from None

    shares = {"CPU": options.replica_cpus, "GPU": options.replica_gpus}
    check_resources(options.replicas, shares, ray.cluster_resources())
    deployment: Any = serve.deployment(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": shares["CPU"], "num_gpus": shares["GPU"]},
        max_ongoing_requests=options.max_videos + options.max_waiting + 1,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=1,
    )(Replica)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    try:
        running = serve.run(deployment.bind(options), name=NAME, route_prefix=None)
    except (RayServeException, RuntimeError) as error:
        raise ValueError(f"replicas failed to start: {error}") from None
    return running.options(stream=True)


def _ray_error() -> type[Exception]:
    from ray.exceptions import RayError

    return RayError


class Forwarded(Response):
    """A response that a replica streams, message by message."""

    background = None

    def __init__(self, replicas: Replicas, body: bytes) -> None:
        self.replicas, self.asked = replicas, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept: dict[str, Any] = {name: scope[name] for name in KEPT.split() if name in scope}
        kept[NOTES] = scope[NOTES]
        told = list[Message]()
        for _ in range(TRIES):
            answer = self.replicas.handle.answer.remote(kept, self.asked)
            watching = asyncio.create_task(_when_gone(receive, answer))
            again = len(told)  # messages that the client already has
            try:
                async for message in answer:
                    if again:
                        again -= 1
                        continue
                    told.append(message)
                    await send(message)
                    if "body" in message and not message.get("more_body"):
                        return  # a disconnect from now on means nothing
            except _ray_error() as error:
                logger.warning("a replica failed", extra={"fields": {"error": str(error)[:300]}})
            finally:
                watching.cancel()
            if any(_is_news(message) for message in told):
                break
        failed = ApiError(502, "the replica that handled the request died", None, "replica_failed")
        if not told:
            await failed.response()(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": error_event(failed)})


def _is_news(message: Message) -> bool:
    """Return whether the client has received part of an answer."""
    return message.get("body", ACCEPTED) != ACCEPTED


async def _when_gone(receive: Receive, answer: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()
