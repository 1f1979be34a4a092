"""The gate before all routes: API keys, loading and draining, metrics and the log."""

import json
import logging
import secrets
import time
from collections.abc import Collection
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diagd.web.guard import NO_KEY, Keys
from diagd.web.serve.errors import ApiError
from diagd.web.serve.metrics import Metrics

logger = logging.getLogger("diagd.serve")
State = Literal["loading", "ready", "draining"]
KEYLESS = ("/health", "/v1/pictures/")  # names of pictures are secrets
NOTES = "diagd.notes"  # in a scope: what a route adds to the log line


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": round(record.created, 3), "level": record.levelname.lower()}
        said |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


class Gate:
    """Admits requests that have a key while the model is ready."""

    def __init__(self, app: ASGIApp, keys: Collection[str], metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics
        self.keys = Keys(keys)
        self.state: State = "loading"
        self.num_open = self.num_answered = 0  # requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # the client disconnected first

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", notes["id"].encode()))
            await send(message)

        notes: dict[str, Any] = {"id": secrets.token_hex(8)}
        scope[NOTES] = notes
        self.num_open += 1
        try:
            if (refused := self._refuse(scope, notes)) is not None:
                await refused.response()(scope, receive, told)
            else:
                await self.app(scope, receive, told)
        finally:
            self.num_open -= 1
            self.num_answered += 1
            self._count(scope, status, time.perf_counter() - started, notes)

    def _refuse(self, scope: Scope, notes: dict[str, Any]) -> ApiError | None:
        notes["client"] = scope["client"][0] if scope["client"] else ""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.keys.names and not path.startswith(KEYLESS):
            if (name := self.keys.of(Headers(scope=scope))) is None:
                return ApiError(401, NO_KEY, None, "invalid_api_key")
            notes["client"] = name
        if scope["method"] == "POST" and self.state != "ready":
            why = (
                "the model is loading" if self.state == "loading" else "the server is shutting down"
            )
            return ApiError(503, why, None, self.state, retry_after=5)
        return None

    def _count(self, scope: Scope, status: int, seconds: float, notes: dict[str, Any]) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "")  # the pattern: unknown paths must not become labels
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if path != "/health":
            fields = {"method": scope["method"], "route": path, "status": status}
            fields |= {"seconds": round(seconds, 4), **notes}
            logger.info("request", extra={"fields": fields})
