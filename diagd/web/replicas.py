"""Replicas: processes with the model behind one server, each an application of Ray Serve.

The server keeps connections, and passes their messages (of ASGI) on; a replica runs the app that
answers them. A request or a socket stays with one replica, which alone knows what it said before.
Ray Serve starts replicas, and again when they die. Calls have single answers: Ray's client
(`ray://`) streams none.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp, Message, Receive, Scope

from diagd.extras import require
from diagd.web.guard import MAX_CONNECTIONS
from diagd.web.options import ReplicaFlags
from diagd.workers import check_resources, start_ray

logger = logging.getLogger("diagd.serve")
TRIES = 3
# makes, of a server's options, an app and the task that runs its model
Make = Callable[[Any], Awaitable[tuple[ASGIApp, asyncio.Task[None]]]]
# the parts of a scope that a replica needs, which can be pickled
KEPT = {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"}
KEPT |= {"root_path", "headers", "client", "subprotocols", "diagd.notes"}


class LostError(Exception):
    """A replica died in the midst of an answer."""


class Replica:
    """A process with the model, which answers requests and sockets, each under a name."""

    async def __init__(self, make: Make, options: ReplicaFlags, folder: Path) -> None:
        torch.set_num_threads(max(1, math.ceil(options.replica_cpus)))
        with contextlib.suppress(OSError):  # relative paths mean the same as there, if it is here
            os.chdir(folder)
        self.app, self.running = await make(options)
        self.heard = dict[str, asyncio.Queue[Message]]()  # of the client
        self.said = dict[str, asyncio.Queue[Message | None]]()
        self.answering = dict[str, asyncio.Task[None]]()

    def check_health(self) -> None:
        if self.running.done():
            raise RuntimeError("what runs the model has stopped")

    async def open(self, name: str, scope: dict[str, Any], first: Message) -> None:
        """Begin to answer a request or a socket, by its first message."""
        self.heard[name], self.said[name] = asyncio.Queue(), asyncio.Queue()
        self.heard[name].put_nowait(first)
        answer = self.app(scope, self.heard[name].get, self.said[name].put)
        self.answering[name] = asyncio.ensure_future(answer)
        self.answering[name].add_done_callback(lambda _: self.said[name].put_nowait(None))

    async def take(self, name: str) -> list[Message | None]:
        """Wait for messages of an answer, and return them; None ends it."""
        said = self.said[name]
        messages = [await said.get()]
        while not said.empty():
            messages.append(said.get_nowait())
        if messages[-1] is None:
            del self.said[name], self.heard[name]
            await self.answering.pop(name)  # which may have failed
        return messages

    async def tell(self, name: str, message: Message) -> None:
        """Hear a client, unless the answer is over."""
        if name in self.heard:
            self.heard[name].put_nowait(message)


@dataclass(eq=False)
class Remote:
    """A replica, as the server sees it."""

    handle: Any
    num_open: int = 0  # requests and sockets
    is_up: bool = True

    async def answer(
        self, scope: Scope, first: Message, receive: Receive
    ) -> AsyncIterator[Message]:
        """Yield the messages of an answer; RayError if the replica dies."""
        name = secrets.token_hex(8)

        async def listen() -> None:
            message = first
            while not message["type"].endswith(".disconnect"):
                message = await receive()
                await self.handle.tell.remote(name, message)

        self.num_open += 1
        kept = {key: value for key, value in scope.items() if key in KEPT}
        try:
            await self.handle.open.remote(name, kept, first)
            listening = asyncio.create_task(listen())
            try:
                while True:
                    for message in await self.handle.take.remote(name):
                        if message is None:
                            return
                        yield message
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)  # fails as the answer does
        finally:
            self.num_open -= 1


class Replicas:
    """The replicas of a server, from start to shutdown."""

    def __init__(self, make: Make, options: ReplicaFlags, name: str) -> None:
        require("--replicas", "ray")
        self.make, self.options, self.name = make, options, name
        self.remotes: list[Remote] = []
        self.mending = set[asyncio.Task[None]]()

    def start(self) -> None:
        """Start the replicas and wait for their models; ValueError if that fails.

        Ray's processes end with the thread that calls this.
        """
        handles = _deploy(self.make, self.options, self.applications)
        self.remotes = [Remote(handle) for handle in handles]

    @property
    def applications(self) -> list[str]:
        return [f"diagd-{self.name}-{number}" for number in range(self.options.replicas)]

    async def pick(self) -> Remote:
        """Return the least busy replica of those that live, waiting for one."""
        while not (up := [one for one in self.remotes if one.is_up]):
            await asyncio.sleep(0.1)
        return min(up, key=lambda one: one.num_open)

    async def answer(
        self, scope: Scope, first: Message, receive: Receive, remote: Remote | None = None
    ) -> AsyncIterator[tuple[Remote, Message]]:
        """Yield the messages of an answer, and the replica that said them.

        Without a given one, another replica is tried if one dies before the client has received
        anything; else a replica that dies is a `LostError`.
        """
        num_told, is_told = 0, False
        for _ in range(1 if remote else TRIES):
            asked = remote or await self.pick()
            again = num_told  # messages that the client already has
            try:
                async for message in asked.answer(scope, first, receive):
                    if again:
                        again -= 1
                        continue
                    num_told, is_told = num_told + 1, is_told or _is_news(message)
                    yield asked, message
                return
            except _ray_error() as error:
                logger.warning("a replica failed", extra={"fields": {"error": str(error)[:300]}})
                if asked.is_up:
                    mending = asyncio.create_task(self._mend(asked))
                    self.mending.add(mending)
                    mending.add_done_callback(self.mending.discard)
            if is_told:
                break
        raise LostError

    async def _mend(self, remote: Remote) -> None:
        """Ask nothing of a replica until it answers again."""
        remote.is_up = False
        while not remote.is_up:
            await asyncio.sleep(0.5)
            with contextlib.suppress(_ray_error()):
                await remote.handle.tell.remote("", {})
                remote.is_up = True

    def close(self) -> None:
        """Stop the replicas, and a cluster that was started for them."""
        _stop(self.applications if self.options.address else [])


def _deploy(make: Make, options: ReplicaFlags, names: Sequence[str]) -> list[Any]:
    """Start an application for each name, and return their handles."""
    ray = start_ray(options.address)
    try:
        from ray import serve  # slow to import, and one process does not need it
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise ValueError(f"--replicas needs Ray Serve: {error}") from None

    shares = {"CPU": options.replica_cpus, "GPU": options.replica_gpus}
    check_resources(options.replicas, shares, ray.cluster_resources())
    deployment: Any = serve.deployment(
        ray_actor_options={"num_cpus": shares["CPU"], "num_gpus": shares["GPU"]},
        max_ongoing_requests=4 * MAX_CONNECTIONS,  # the app has bounds of its own
        health_check_period_s=1,
    )(Replica)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    bound = deployment.bind(make, options, Path.cwd())
    try:
        return serve.run_many([serve.RunTarget(bound, name, None) for name in names])
    except (RayServeException, RuntimeError) as error:
        if options.address:
            _stop(names)
        raise ValueError(f"replicas failed to start: {error}") from None


def _stop(names: Sequence[str]) -> None:
    """Delete applications of a cluster that goes on, and leave it, or end our own."""
    import ray

    if names and ray.is_initialized():
        from ray import serve

        for name in names:
            serve.delete(name)
    ray.shutdown()


def _ray_error() -> type[Exception]:
    from ray.exceptions import RayError

    return RayError


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the handlers of signals that Ray replaces, in the main thread."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _is_news(message: Message) -> bool:
    """Return whether a message has part of an answer; a comment among events has none."""
    return bool(message.get("text") or message.get("bytes")) or (
        message.get("body", b":")[:1] != b":"
    )
