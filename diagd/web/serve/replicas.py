"""Replicas of `diagd serve`: the server checks keys and sizes, and passes whole requests on.

A replica answers them with the routes of a server without replicas.
"""

import asyncio

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diagd.web.guard import read_body
from diagd.web.replicas import LostError, Replicas, kept_signals
from diagd.web.serve.errors import ApiError, handle_errors
from diagd.web.serve.events import error_event
from diagd.web.serve.options import ServeOptions
from diagd.web.serve.service import MAX_CLIP_BYTES, Service
from diagd.web.uploads import MAX_SECONDS_OF_UPLOAD


async def make_service(options: ServeOptions) -> tuple[FastAPI, asyncio.Task[None]]:
    """Load the model; return its routes, and the task that runs it."""
    service, app = Service(options), FastAPI(openapi_url=None)
    handle_errors(app)
    service.add_routes(app)
    await service.start()
    return app, asyncio.create_task(service.run())


class ServeReplicas:
    """Stands in for a `Service`."""

    def __init__(self, options: ServeOptions) -> None:
        self.replicas = Replicas(make_service, options, "serve")
        self.close = self.replicas.close

    async def start(self) -> None:
        """Start the replicas and wait for their models; ValueError if that fails."""
        with kept_signals():
            await asyncio.to_thread(self.replicas.start)

    async def run(self) -> None:
        """Ray Serve runs everything."""
        await asyncio.Event().wait()

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes that replicas answer to an app that handles `ApiError`."""

        async def forward(request: Request) -> Response:
            return Forwarded(
                self.replicas, await read_body(request, MAX_CLIP_BYTES, MAX_SECONDS_OF_UPLOAD)
            )

        for path in ("/v1/images/generations", "/v1/videos/continuations"):
            app.post(path)(forward)


class Forwarded(Response):
    """A response that a replica makes, message by message."""

    background = None

    def __init__(self, replicas: Replicas, body: bytes) -> None:
        self.replicas, self.asked = replicas, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, has_begun, is_whole = {"type": "http.request", "body": self.asked}, False, False
        try:
            async for _, message in self.replicas.answer(scope, first, receive):
                await send(message)
                has_begun, is_whole = True, not message.get("more_body", "body" not in message)
        except LostError:
            why = "the replica that handled the request died"
            failed = ApiError(502, why, None, "replica_failed")
            if not has_begun:
                await failed.response()(scope, receive, send)
            elif not is_whole:
                await send({"type": "http.response.body", "body": error_event(failed)})
