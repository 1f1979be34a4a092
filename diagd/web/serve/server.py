"""Serve a model to programs: images by OpenAI's API, videos that continue a clip.

diagd serve --model deepseek-ai/Janus-Pro-1B
diagd serve --model PATH --host 0.0.0.0 --api-keys keys.txt
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

from diagd.console import make_console
from diagd.web.guard import listen, server_config, url_of
from diagd.web.serve.errors import handle_errors
from diagd.web.serve.gate import Gate, JsonLines
from diagd.web.serve.metrics import MEDIA_TYPE, Metrics
from diagd.web.serve.options import ServeOptions
from diagd.web.serve.replicas import ServeReplicas
from diagd.web.serve.service import Service, check_name, name_of

logger = logging.getLogger("diagd.serve")


def serve(options: ServeOptions) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; returns the address and the number of requests."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with listen(options.host, options.port) as listening:
            server = ServeServer(options)
            url = url_of(*listening.getsockname()[:2])
            make_console().print(f"serving {options.model} at {url}/v1 (Ctrl-C ends it)")
            server.run(sockets=[listening])
    finally:
        logger.removeHandler(handler)
    if server.failure is not None:
        raise server.failure
    return {"url": url, "requests": server.gate.num_answered}


class ServeServer(uvicorn.Server):
    """A server that drains at the first SIGTERM or Ctrl-C: it completes requests, then exits."""

    def __init__(self, options: ServeOptions) -> None:
        self.options, self.metrics = options, Metrics()
        local = options.is_this_process
        self.service = Service(options, self.metrics) if local else ServeReplicas(options)
        self.gate = Gate(self._app(), options.keys(), self.metrics)
        self.running: asyncio.Task[None] | None = None  # loads and runs the model
        self.failure: BaseException | None = None  # why it ended
        self.drained_at = float("inf")
        app: Any = self.gate
        if options.cors:
            app = CORSMiddleware(app, options.cors, allow_methods=["*"], allow_headers=["*"])
        settings = {"ws": "none", "timeout_graceful_shutdown": 2, "root_path": options.root_path}
        names = (options.host, *options.allow_host)
        super().__init__(server_config(app, names, options.cors, **settings))

    def _app(self) -> FastAPI:
        """Build the routes, and load the model when the server starts."""

        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self.running = running = asyncio.create_task(self._run())
            try:
                yield
            finally:
                running.cancel()
                await asyncio.wait([running])
                if not running.cancelled():
                    self.failure = running.exception()
                await asyncio.to_thread(self.service.close)

        app = FastAPI(lifespan=lifespan, openapi_url=None)
        handle_errors(app)
        model: dict[str, Any] = {"id": name_of(self.options), "object": "model"}
        model |= {"created": int(time.time()), "owned_by": "diagd"}

        @app.get("/health")
        async def health() -> JSONResponse:
            return JSONResponse(
                {"status": self.gate.state}, 200 if self.gate.state == "ready" else 503
            )

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.text(), media_type=MEDIA_TYPE)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [model]}

        @app.get("/v1/models/{name:path}")
        async def one_model(name: str) -> dict[str, Any]:
            check_name(name, self.options)
            return model

        self.service.add_routes(app)
        return app

    async def _run(self) -> None:
        await self.service.start()
        self.gate.state = "ready"
        await self.service.run()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.gate.state != "ready":
            super().handle_exit(sig, frame)
        self.gate.state = "draining"
        self.drained_at = time.monotonic() + self.options.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        is_drained = self.gate.state == "draining" and not self.gate.num_open
        is_over = is_drained or time.monotonic() > self.drained_at
        has_failed = self.running is not None and self.running.done()
        return await super().on_tick(counter) or is_over or has_failed
