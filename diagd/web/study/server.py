"""The server of the study: limits, and what every request passes first.

Why Origin and Host are looked at is in `guard`. A study is stricter: it answers to the addresses
that were printed, by their port or by none, and reads short messages only.
"""

import asyncio
from collections.abc import Collection

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diagd.web.connections import SECONDS_TO_ASK, PatientProtocol
from diagd.web.guard import adding_headers, check_origin, page_rules
from diagd.web.study.app import study_app
from diagd.web.study.options import LOOPBACK
from diagd.web.study.pairs import StudyPairs
from diagd.web.study.store import StudyStore

MAX_HEADER_BYTES = 16384
MAX_BODY_BYTES = 4096
_RULES = page_rules(images="data:", media="blob:")


def study_server(
    pairs: StudyPairs, store: StudyStore, seed: int, port: int, names: Collection[str]
) -> uvicorn.Server:
    """Return a server; `run(sockets=[listen(...)])` answers requests until it is interrupted.

    Args:
        seed: of the order and the sides that raters get.
        port: that it will listen on.
        names: host names besides the loopback ones under which it is reached.
    """
    bracketed = (f"[{name}]" if ":" in name else name for name in (*LOOPBACK, *names))
    # browsers leave out :80 and :443, the latter also of a proxy before this port
    hosts = {host for name in bracketed for host in (name.lower(), f"{name.lower()}:{port}")}
    config = uvicorn.Config(
        RequestGuard(study_app(pairs, store, seed), hosts),
        http=PatientProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        server_header=False,
    )
    return uvicorn.Server(config)


class RequestGuard:
    """Refuse foreign hosts, foreign pages and large messages; forbid pages to load from elsewhere.

    Args:
        app: answers what passes.
        hosts: the values of Host (`name`, `name:port`) under which this server is reached.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error in words."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        send = adding_headers(send, _RULES)
        refusal = self._refusal(Headers(scope=scope), scope["method"])
        if refusal is None:
            try:
                async with asyncio.timeout(SECONDS_TO_ASK):
                    body = await _read(receive)
            except TimeoutError:
                refusal = 408, "the message took too long"
            else:
                if body is not None:
                    await self.app(scope, _replay(body, receive), send)
                    return
                refusal = 413, f"the message is larger than {MAX_BODY_BYTES} bytes"
        status, error = refusal
        await JSONResponse({"error": error}, status)(scope, receive, send)

    def _refusal(self, headers: Headers, method: str) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if host.lower() not in self.hosts:
            return 421, "this address is not known here: use the one that diagd study printed"
        if check_origin(headers.getlist("origin"), [host]):
            return 403, "this page belongs to another site"
        if method == "POST" and headers.get("content-type") != "application/json":
            return 415, "messages must be application/json"
        return None


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body, or None as soon as it is too large or its sender is gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message["body"]
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message["more_body"]:
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body once more, then whatever comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
