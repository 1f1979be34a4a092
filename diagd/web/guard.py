"""Who may talk to a local server: its own pages, by its own name. Wraps any ASGI app.

A browser on this machine also shows foreign pages. They may not drive the server (Origin), and no
foreign name that resolves to this machine may pass for it (Host; DNS rebinding). What is served may
load nothing from elsewhere (Content-Security-Policy).
"""

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

HOST = re.compile(r"(?:([a-z0-9.-]+)|\[([0-9a-f:.]+)\])(?::[0-9]{1,5})?", re.ASCII | re.I)


def page_rules(images: str, media: str) -> dict[str, str]:
    """Return the headers that let a page load its own scripts and styles, and no more.

    Args:
        images, media: from where it may take pictures, and videos.
    """
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        f"img-src {images}; media-src {media}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


_RULES = page_rules(images="'self' blob: data:", media="'self' blob:")


class Guard:
    """ASGI middleware that refuses foreign hosts and origins with 403, and adds headers."""

    def __init__(self, app: Any, allowed_hosts: Collection[str] = ()) -> None:
        """Wrap an app.

        Args:
            allowed_hosts: names by which it may be called, besides localhost and IP addresses.
        """
        self.app, self.allowed_hosts = app, {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request or a socket, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        named = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        hosts = [value for name, value in named if name == "host"]
        origins = [value for name, value in named if name == "origin"]
        complaint = check_host(hosts, self.allowed_hosts) or check_origin(origins, hosts)
        if complaint is None:
            await self.app(scope, receive, adding_headers(send, _RULES))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": complaint})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            send = adding_headers(send, _RULES)
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": complaint.encode()})


def check_host(hosts: list[str], allowed: Collection[str]) -> str | None:
    """Return what is wrong with the Host headers, or None.

    A host is a name or an address, and perhaps a port, with nothing before, between or after.
    Addresses are fine: only a name can be made to point elsewhere.
    """
    if len(hosts) != 1:
        return "expected one Host header"
    if (found := HOST.fullmatch(hosts[0])) is not None:
        name, bracketed = found.groups()
        if bracketed is not None and _is_address(bracketed, ipaddress.IPv6Address):
            return None
        if name is not None and _is_known(name.lower(), allowed):
            return None
    return f"this server does not answer to the name {hosts[0][:80]!r} (see --allow-host)"


def check_origin(origins: list[str], hosts: list[str]) -> str | None:
    """Return what is wrong with the Origin headers, or None; only browsers send any."""
    own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
    foreign = [origin for origin in origins if origin.lower() not in own]
    return f"a page of {foreign[0][:80]} may not use this server" if foreign else None


def _is_known(name: str, allowed: Collection[str]) -> bool:
    return name == "localhost" or name in allowed or _is_address(name, ipaddress.IPv4Address)


def _is_address(name: str, kind: Callable[[str], Any]) -> bool:
    try:
        kind(name)
    except ValueError:
        return False
    return True


def adding_headers(send: Any, headers: Mapping[str, str]) -> Any:
    """Wrap an ASGI app's `send` so that every HTTP response carries these headers, too."""
    added = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending
