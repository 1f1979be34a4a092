"""Where a local server listens, and the address by which browsers find it."""

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free one.

    Who calls before the server runs waits until it does.

    Raises:
        ValueError: no such port, or the address is not ours, or taken.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be in [0, {2**16}), got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen on {host!r}: {error.strerror or error}") from None
    if os.name == "posix":  # elsewhere it lets two servers share a port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror} (another --port may be free)"
        ) from None
    return listening


def url_of(host: str, port: int) -> str:
    """Return the address of a server, without a slash at its end."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
