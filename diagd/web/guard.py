"""The socket of a local server, patience with clients, keys, and refusal of what others send."""

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import h11
import uvicorn
from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 200
SECONDS_TO_ASK = 10.0
NO_KEY = "a valid API key is needed"
LOGIN = Path(__file__).with_name("static") / "login.html"
OF_LOGIN = ("/static/style.css", "/static/icon.svg")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # of what is sent to us
T = TypeVar("T")
HOST = re.compile(r"(?:([\w.-]+)|\[([0-9a-f:.]+)\])(?::[0-9]{1,5})?", re.ASCII | re.I)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or raise ValueError; port 0 is any free one."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be in [0, {2**16}), got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address, family=family, dualstack_ipv6=both)
        # inherited by connections; asyncio does not set it, and responses were delayed by 40 ms
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return listening
    except (socket.gaierror, UnicodeError) as error:  # also: a label that is empty, or too long
        raise ValueError(f"cannot listen on {host!r}: {error.args[-1]}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"cannot listen on {host}:{port}: {why} (another --port may be free)"
        ) from None


def url_of(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class PatientProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with a timeout: uvicorn waits for ever for the end of a request."""

    _host: str | None = None  # of the client
    _silent_since = 0.0  # when the connection was opened, or last answered, by the loop's clock
    _deadline: asyncio.TimerHandle
    _unread = 0  # bytes of answers that the client has yet to read

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._host = self.client and self.client[0]
        self._wait()
        if len(self.connections) <= MAX_CONNECTIONS:
            return
        silent = [
            one for one in self.connections if isinstance(one, PatientProtocol) and one._is_silent
        ]  # this one at least
        held = Counter(one._host for one in silent)
        gone = min(silent, key=lambda one: (-held[one._host], one._silent_since))
        gone.transport.abort()
        self.connections.discard(gone)  # as it will itself when it hears of that

    def on_response_complete(self) -> None:
        self._deadline.cancel()
        self._wait()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._deadline.cancel()  # the socket's protocol pings
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, of which the app hears no more, unless it was answered before."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()

    @property
    def _asks_nothing(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_silent(self) -> bool:  # the server waits for the client, to speak or to read
        return self._asks_nothing or self.cycle.more_body or self.flow.write_paused

    def _wait(self) -> None:
        self._silent_since = self.loop.time()
        self._unread = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(SECONDS_TO_ASK, self._give_up)

    def _give_up(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:  # it goes on reading what it was sent
            self._wait()
        elif unread or self._asks_nothing:
            self.transport.abort()


_RULES = {  # a page loads its own scripts, styles, pictures and clips, and nothing from elsewhere
    "content-security-policy": (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
        "connect-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def guarded(app: ASGIApp, allowed_hosts: Collection[str], origins: Collection[str]) -> ASGIApp:
    """Refuse pages of other origins, and names other than localhost and these, with a 403."""
    allowed = {name.lower() for name in allowed_hosts}

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        answer, complaint = app, None
        if scope["type"] != "lifespan":
            headers = Headers(scope=scope)
            hosts = headers.getlist("host")
            asking = [one for one in headers.getlist("origin") if one not in origins]
            complaint = check_host(hosts, allowed) or check_origin(asking, hosts)
        if complaint and scope["type"] == "websocket":
            answer = WebSocketClose(1008, complaint)
        elif complaint:
            answer = PlainTextResponse(complaint, 403)
        await answer(scope, receive, send)

    return check


class Keys:
    """Keys that clients must have, compared in constant time; a cookie holds a digest of one."""

    def __init__(self, keys: Collection[str]) -> None:
        self.names = {  # for logs and cookies, by what is compared
            _proof(key): f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}" for key in keys
        }

    def of(self, headers: Headers) -> str | None:
        """Return the name of the key that a client has shown, or None."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        kept = cookie_parser(headers.get("cookie", ""))
        shown = [_proof(key)] if scheme.lower() == "bearer" else []
        return self._find([*shown, *(kept.get(name, "") for name in self.names.values())])

    def _find(self, shown: Collection[str]) -> str | None:
        known = [  # compare with all keys, in constant time
            name
            for proof, name in self.names.items()
            for one in shown
            if hmac.compare_digest(proof.encode(), one.encode())
        ]
        return known[0] if known else None

    async def log_in(self, request: Request) -> Response:
        """Answer the page's form: it sends the key once, and the cookie from then on."""
        try:
            body = await read_body(request, 1024, SECONDS_TO_ASK)
        except HTTPException as error:
            return PlainTextResponse(error.detail, error.status_code)
        proof = _proof(parse_qs(body.decode("latin-1")).get("key", [""])[0].strip())
        if (name := self._find([proof])) is None:
            return _login_page("This key is not known here.")
        there = f"./?{request.url.query}" if request.url.query else "./"
        answer, is_secure = RedirectResponse(there, 303), request.url.scheme == "https"
        answer.set_cookie(name, proof, path=None, secure=is_secure, httponly=True, samesite="lax")
        return answer


def _proof(key: str) -> str:
    return hmac.digest(key.encode(), b"diagd", "sha256").hex()


def _login_page(problem: str = "") -> Response:
    page = LOGIN.read_text(encoding="utf-8").replace("PROBLEM", problem)
    return HTMLResponse(page, 401)


def locked(app: ASGIApp, keys: Keys) -> ASGIApp:
    """Serve an app of a page to those who show a key, and ask people for theirs."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        is_open = scope["type"] == "lifespan" or scope["path"] in OF_LOGIN
        if not is_open and keys.of(Headers(scope=scope)) is None:
            answer = JSONResponse({"detail": NO_KEY}, 401)
            if scope["type"] == "http" and scope["path"] == "/":
                is_form = scope["method"] == "POST"
                request = Request(scope, receive)
                answer = await keys.log_in(request) if is_form else _login_page()
        await answer(scope, receive, send)

    return check


def server_config(
    app: ASGIApp, allowed_hosts: Collection[str], origins: Collection[str] = (), **settings: Any
) -> uvicorn.Config:
    """Configure a server of a guarded app, which waits for no client for ever."""
    return uvicorn.Config(
        guarded(app, allowed_hosts, origins),
        http=PatientProtocol,
        loop="asyncio",  # not uvloop, which Ray Serve installs: run what is tested
        headers=list(_RULES.items()),
        log_level="warning",
        server_header=False,
        **settings,
    )


def check_host(hosts: list[str], allowed: Collection[str]) -> str | None:
    """Return a complaint about the Host headers, or None."""
    if len(hosts) != 1:
        return "expected one Host header"
    found = HOST.fullmatch(hosts[0])
    name, bracketed = found.groups() if found else ("", None)
    with suppress(ValueError):  # any address is allowed: only names can be made to point elsewhere
        if bracketed is not None:
            ipaddress.IPv6Address(bracketed)
        elif name.lower() not in {"localhost", *allowed}:
            ipaddress.IPv4Address(name)
        return None
    return f"this server does not answer to the name {hosts[0][:80]!r} (see --help)"


def check_origin(origins: list[str], hosts: list[str]) -> str | None:
    """Return a complaint about the Origin headers, which only browsers send, or None."""
    own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
    foreign = [origin for origin in origins if origin.lower() not in own]
    return f"a page of {foreign[0][:80]} may not use this server" if foreign else None


class JSONError(ValueError):
    """An invalid document, and the place of its first error."""

    place: str | None = None


def read_json(adapter: TypeAdapter[T], data: bytes | str | Mapping[str, str], kind: str) -> T:
    """Validate a JSON document, or raise ValueError with the first error and its place.

    Of the fields of a form, which are texts, numbers are read.
    """
    try:
        if isinstance(data, bytes | str):
            return adapter.validate_json(data)
        return adapter.validate_python(data, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = first["msg"].removeprefix("Value error, ")
        place = ".".join(map(str, first["loc"]))
        invalid = JSONError(f"not a {kind}: {': '.join(filter(None, [place, text]))[:300]}")
        invalid.place = place or None
        raise invalid from None


async def read_body(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """Read the whole body of a request, or raise an HTTPException."""
    body, close = bytearray(), {"connection": "close"}  # nobody reads the rest
    try:
        async with asyncio.timeout(max_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise HTTPException(413, f"a request is at most {max_bytes >> 10} kB", close)
    except TimeoutError:
        raise HTTPException(408, "the request took too long", close) from None
    except ClientDisconnect:
        raise HTTPException(400, "the request was broken off", close) from None
    return bytes(body)
