"""Play a world that `diagd play` serves: a frame for each step, and no PyTorch on this side.

    with Session("ws://127.0.0.1:8421") as session:
        frame = session.reset("corridor", seed=3)
        frame = session.step("forward")

docs/protocol.md describes what is sent.
"""

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diagd.checks import brief, whole
from diagd.extras import require

PROTOCOL = 1  # counts up where a client of today would misread, or be refused, what it knows
SILENCE_SECONDS = 20.0  # four times what a server lets pass without a word
UPLOAD_SECONDS = 90.0
MAX_MESSAGE_BYTES = 64 * 2**20

Frame = NDArray[np.uint8]
Action = str | int | Sequence[float] | NDArray[Any]
Result = TypeVar("Result")


class Session:
    """A place in a world that runs elsewhere, which stands still between two steps.

    Args:
        url: of the server, as it prints it, or with ws:// or wss://; maybe below a path of a proxy.
        strategy: how frames are decoded, by name; like temperature and top_p the server's choice by
            default. What does not fit the world is a ValueError.
        temperature: of draws, in [0, 5].
        top_p: nucleus of draws, in [0.01, 1].
        lossless: have frames sent as PNG, the very pixels of the world; else as JPEG, a fifth of
            the bytes.
        api_key: for a server, or a proxy before it, that asks for one (`Authorization: Bearer`).
        wait_seconds: to wait in line for a place.

    Attributes:
        actions: names of actions; where these combine, some joined by `+` are an action, too.
        axes: where actions are vectors: the name, lowest and highest number of each axis.
        scenes: names of the scenes to begin in.
        size_px: height and width of a frame.
        fps: frames per second of the world's own pace.
        header: what the server told of the newest frame (`Start`, `Frame` in docs/protocol.md).

    Raises:
        ConnectionError: there is no such server, it is full or refuses, or speaks another protocol;
            later, also of `reset` and `step`, that it ended the session or is gone.
    """

    def __init__(
        self,
        url: str,
        *,
        strategy: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        lossless: bool = True,
        api_key: str | None = None,
        wait_seconds: float = 5.0,
    ) -> None:
        require("diagd.client", "websockets")
        from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        self.url, self._closed = _base_of(url), ConnectionClosed
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.header: dict[str, Any] = {}
        self._number = 0  # of the newest step
        self._opened = contextlib.ExitStack()
        try:
            opening = connect(
                f"ws{self.url.removeprefix('http')}play",
                additional_headers=self._headers,
                open_timeout=SILENCE_SECONDS,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=None,  # the server keeps count; a full queue would leave pings unanswered
                compression=None,
            )
            self._socket = self._opened.enter_context(opening)
        except (OSError, WebSocketException) as error:
            refused = isinstance(error, InvalidStatus) and error.response.status_code == 401
            why = f"{error} (a valid api_key is needed)" if refused else error
            raise ConnectionError(f"cannot play at {self.url}: {why}") from None
        with self._closing_if_cut_short():
            until, state = monotonic() + wait_seconds, f"said nothing for {wait_seconds:g} seconds"
            while (told := self._receive(until, state)[0])["type"] == "waiting":
                state = f"is full: {told['message']}"
            if told.get("protocol") != PROTOCOL:
                known = f"speaks protocol {told.get('protocol')}, this client {PROTOCOL}"
                raise ConnectionError(f"{self.url} {known}")
            self.actions, self.scenes = tuple(told["actions"]), tuple(told["scenes"])
            self.axes = [tuple(axis) for axis in told.get("axes", [])]
            self.size_px, self.fps = tuple(told["size_px"]), told["fps"]
            self._combines, self._max_seed = told["keyboard"]["combines"], told["max_seed"]
            self._name, self._max_bytes = told["session"], told["max_upload_bytes"]
            asked = {"strategy": strategy, "temperature": temperature, "top_p": top_p}
            changes = {name: value for name, value in asked.items() if value is not None}
            self._send("pause", paused=True)
            self._send("adjust", **(told["controls"] | changes | {"lossless": lossless}))
            self._receive_start()  # that of every session, which nobody asked for
        if changes:
            self.reset()  # what does not fit is told before it starts
        self.header = {}

    def reset(self, start: str | int | Path | bytes | Frame = 0, seed: int = 0) -> Frame:
        """Begin anew; return the last frame of the start, (H_px, W_px, 3) uint8.

        Args:
            start: a scene, by its name or its number; or a picture or clip of one's own, fitted to
                the world: a file, its bytes, or pixels (H_px, W_px, 3) uint8.
            seed: of the draws, in [0, 2**32).

        Raises:
            ValueError: no such scene, or what the server cannot begin from.
        """
        if not 0 <= whole(seed, "seed") < self._max_seed:
            raise ValueError(f"seed must be in [0, {self._max_seed}), got {seed}")
        if isinstance(start, Path | bytes | np.ndarray):
            self._upload(_file_of(start), seed)
            sent = None
        else:
            names = self.scenes
            sent = names.index(start) if start in names else start
            if not isinstance(sent, int | np.integer) or not 0 <= sent < len(names):
                known = f"a number below {len(names)} or one of: {', '.join(names)}"
                raise ValueError(f"scene must be {known}; got {brief(start)}")
        with self._closing_if_cut_short():
            if sent is not None:
                self._send("begin", scene=int(sent), seed=int(seed))
            return self._receive_start()

    def step(self, action: Action) -> Frame:
        """Return the frame that an action leads to, (H_px, W_px, 3) uint8.

        Args:
            action: by its name or number in `actions`, or a vector: a number for each of `axes`.
        """
        if not self.header:
            raise ValueError("reset must be called before step")
        if isinstance(action, Sequence | np.ndarray):
            if self.axes and not isinstance(action, str):
                if np.size(action) != len(self.axes):
                    given = f"got {np.size(action)}"
                    raise ValueError(f"a vector has {len(self.axes)} numbers, {given}")
                action = f"move({','.join(f'{number:.6g}' for number in np.ravel(action))})"
        elif 0 <= whole(action, "action") < len(self.actions):
            action = self.actions[action]
        if not isinstance(action, str) or not (self._combines or action in self.actions):
            raise ValueError(
                f"unknown action {brief(action)}, expected one of: {', '.join(self.actions)}"
            )
        self._number += 1
        with self._closing_if_cut_short():
            self._send("step", action=action, id=self._number)
            while True:
                header, picture = self._receive()
                if header.get("input") == self._number:
                    return self._show(header, picture)

    def close(self) -> None:
        """Give the place back; nothing can follow."""
        self._opened.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _closing_if_cut_short(self) -> Iterator[None]:
        """An answer that nobody read would pass for that to the next question."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _send(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(self._closed):  # what is left to be received says why
            self._socket.send(json.dumps({"type": kind, **fields}))

    def _receive(
        self,
        until: float | None = None,
        state: str = f"said nothing for {SILENCE_SECONDS:g} seconds",
    ) -> tuple[dict[str, Any], bytes]:
        """Return the next message, and the picture of one that has; raise what ends the session."""
        while True:
            patience = SILENCE_SECONDS if until is None else max(0.0, until - monotonic())
            try:
                message = self._socket.recv(timeout=patience)
            except TimeoutError:
                raise ConnectionError(f"{self.url} {state}") from None
            except self._closed as closed:
                raise ConnectionError(f"{self.url}: the session is closed ({closed})") from None
            if isinstance(message, bytes):
                header, picture = unpack(message)
                self._send("seen", frame=header["frame"])
                return header, picture
            match told := json.loads(message):
                case {"type": "kept"}:
                    raise ValueError(f"{self.url}: {told['message']}")
                case {"type": "refused" | "ended"}:
                    raise ConnectionError(f"{self.url}: {told['message']}")
                case {"type": "welcome" | "waiting"}:
                    return told, b""

    def _receive_start(self) -> Frame:
        while True:
            header, picture = self._receive()
            if "begun" in header:
                return self._show(header, picture)

    def _show(self, header: dict[str, Any], picture: bytes) -> Frame:
        self.header = header
        return np.array(Image.open(io.BytesIO(picture)).convert("RGB"))

    def _upload(self, data: bytes, seed: int) -> None:
        if len(data) > self._max_bytes:
            raise ValueError(f"a picture has at most {self._max_bytes} bytes, got {len(data)}")
        address = f"{self.url}sessions/{self._name}/start?seed={seed}"
        request = Request(address, data, {"Content-Type": "application/octet-stream"})
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)
        try:
            urlopen(request, timeout=UPLOAD_SECONDS).close()
        except HTTPError as error:
            with error:
                answer = error.read()
            if error.code == 400:
                raise ValueError(f"{self.url}: {json.loads(answer)['detail']}") from None
            raise ConnectionError(f"{self.url}: {error}") from None
        except OSError as error:
            self.close()  # it may begin all the same
            raise ConnectionError(f"{self.url}: {error}") from None


class AsyncSession:
    """A `Session` to await, in a thread of its own: `async with AsyncSession(url) as session`.

    Args:
        url, settings: as of `Session`.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._open, self._thread = partial(Session, url, **settings), ThreadPoolExecutor(1)
        self._session: Session | None = None  # set in the thread, though nobody may wait any more

    @property
    def session(self) -> Session:
        """What runs in the thread; its attributes may be read."""
        assert self._session is not None, "a session is entered by `async with`"
        return self._session

    async def reset(self, start: str | int | Path | bytes | Frame = 0, seed: int = 0) -> Frame:
        """Do as `Session.reset`."""
        return await self._run(partial(self.session.reset, start, seed))

    async def step(self, action: Action) -> Frame:
        """Do as `Session.step`."""
        return await self._run(partial(self.session.step, action))

    async def __aenter__(self) -> "AsyncSession":
        try:
            await self._run(self._enter)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wrap_future(self._leave())

    def _enter(self) -> None:
        self._session = self._open()

    def _leave(self) -> Future[None]:
        closing = self._thread.submit(lambda: self._session and self._session.close())
        self._thread.shutdown(wait=False)
        return closing

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Take a binary message apart: 4 bytes, the header's length (big-endian); it; a picture."""
    end = 4 + int.from_bytes(message[:4])
    return json.loads(message[4:end]), message[end:]


def _base_of(url: str) -> str:
    """Return the address of a server, whatever form it was given in: http(s)://.../"""
    scheme, place, path, *_ = urlsplit(url)
    schemes = {"ws": "http", "wss": "https", "http": "http", "https": "https"}
    if scheme not in schemes or not place:
        raise ValueError(f"url must look like ws://127.0.0.1:8421, got {brief(url)}")
    folder = path.removesuffix("/play").rstrip("/")
    return urlunsplit((schemes[scheme], place, f"{folder}/", "", ""))


def _file_of(picture: Path | bytes | Frame) -> bytes:
    if isinstance(picture, Path):
        return picture.read_bytes()
    if isinstance(picture, bytes):
        return picture
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        got = f"{picture.dtype} of shape {picture.shape}"
        raise ValueError(f"a picture must be uint8 of shape (height, width, 3), got {got}")
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()
