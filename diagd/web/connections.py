"""Connections that say nothing keep nobody else out.

A client that opens connections and sends no whole request, or reads no answer, costs it nothing and
would fill any limit. So a connection has `SECONDS_TO_ASK` to say what it wants, and where there are
too many, a new one takes the place of the one that has been silent longest, of the address that has
most of them. Behind a proxy all clients share its address: then the silent still go first.
"""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 200
SECONDS_TO_ASK = 10.0


class PatientProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, which by itself waits for ever for the end of a request.

    Attributes:
        silent_since: when the connection was opened, or last answered, by the event loop's clock.
    """

    silent_since = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of answers that the client has yet to take

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; make room for it."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) <= MAX_CONNECTIONS:
            return
        silent = [
            one for one in self.connections if isinstance(one, PatientProtocol) and one.is_silent
        ]  # this one at least
        held = Counter(one.address for one in silent)
        gone = min(silent, key=lambda one: (-held[one.address], one.silent_since))
        gone.transport.abort()
        self.connections.discard(gone)  # as it will itself when it hears of that

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Leave the connection to the socket's protocol, which pings."""
        self._stop()
        super().handle_websocket_upgrade(event)

    @property
    def address(self) -> str:
        """Return where the client is, without its port."""
        return self.client[0] if self.client else ""

    @property
    def is_silent(self) -> bool:
        """Whether it is the client who is waited for: to speak, or to read."""
        return self._asks_nothing or self.cycle.more_body or self.flow.write_paused

    @property
    def _asks_nothing(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._stop()
        self.silent_since = self.loop.time()
        self._unread = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(SECONDS_TO_ASK, self._give_up)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        """End the connection, unless it is served, or goes on reading what it was sent."""
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:
            self._wait()
        elif unread or self._asks_nothing:
            self.transport.abort()
