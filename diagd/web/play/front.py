"""The server before replicas of a world: a session stays with its replica from start to end."""

import asyncio
import json
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from diagd.web.guard import read_body
from diagd.web.play.messages import Ended, to_json
from diagd.web.play.scheduler import CRASHED
from diagd.web.replicas import LostError, Remote, Replicas
from diagd.web.uploads import MAX_SECONDS_OF_UPLOAD, MAX_UPLOAD_BYTES

MAX_KNOWN = 10_000  # sessions, for what is uploaded and downloaded beside their sockets


class Front:
    """An app that passes sockets and requests on.

    Attributes:
        sessions, frames: begun, and sent as pictures, so far.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas, self.sessions, self.frames = replicas, 0, 0
        self.computed = f"{replicas.options.replicas} replicas"
        self.known = dict[str, Remote]()  # by the secrets of their sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] == "websocket":
            await self.play(scope, receive, send)
        else:
            try:
                await self.request(scope, receive, send)
            except HTTPException as error:
                answer = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
                await answer(scope, receive, send)

    async def live(self, receive: Receive, send: Send) -> None:
        """Stop the replicas in the end."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(self.replicas.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def play(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def told(message: Message) -> None:
            with suppress(OSError):  # the client is gone: the replica hears of that
                await send(message)

        try:
            async for remote, message in self.replicas.answer(scope, await receive(), receive):
                self.frames += "bytes" in message
                if '"type":"welcome"' in (message.get("text") or ""):
                    self._note(json.loads(message["text"])["session"], remote)
                is_open = message["type"] != "websocket.close"
                await told(message)
        except LostError:
            if is_open:
                ended = Ended("The process that generated this dream died: this dream is over.")
                await told({"type": "websocket.send", "text": to_json(ended)})
            await told({"type": "websocket.close", "code": CRASHED})

    def _note(self, session: str, remote: Remote) -> None:
        self.sessions += 1
        self.known[session] = remote
        while len(self.known) > MAX_KNOWN:
            del self.known[next(iter(self.known))]

    async def request(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, kind, name, *_ = [*scope["path"].split("/"), "", ""]
        remote = self.known.get(name) if kind == "sessions" else None
        if kind == "sessions" and remote is None:
            raise HTTPException(404, "this session is over")
        body = await read_body(Request(scope, receive), MAX_UPLOAD_BYTES, MAX_SECONDS_OF_UPLOAD)
        first, has_begun = {"type": "http.request", "body": body}, False
        try:
            async for _, message in self.replicas.answer(scope, first, receive, remote):
                has_begun = True
                await send(message)
        except LostError:
            if not has_begun:
                raise HTTPException(502, "the process that answers this died") from None
