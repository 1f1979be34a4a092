"""The web app of `diagd play`: one page, one socket for each player, and four small requests.

    GET  /                              the page; GET /static/NAME and /scenes/NUMBER.jpg beside it
    WS   /play                          messages in, frames out (see `diagd.web.play.messages`)
    POST /sessions/ID/start             an image or a clip to start from
    POST /sessions/ID/replay            a saved session to play again
    GET  /sessions/ID/session.json      the session, to be saved
    GET  /sessions/ID/video.mp4         what was recorded

Files are read once, when the app is made: no path that a client sends reaches the file system.
"""

import asyncio
import json
import mimetypes
import time
from collections.abc import AsyncIterator, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.diagonal import Diagonal, Raster, Scheduled
from diagd.decoding.strategies.exact.exact import Exact
from diagd.decoding.strategies.table import parse_strategy
from diagd.pipeline.generator import VideoGenerator
from diagd.web.guard import Guard
from diagd.web.play.encoding import to_mp4
from diagd.web.play.keyboard import keyboard_of
from diagd.web.play.messages import pack, parse
from diagd.web.play.player import Frame, Player, Welcome
from diagd.web.play.saved_session import load, save
from diagd.web.play.scheduler import TRY_LATER, WRONG, Scheduler
from diagd.web.play.session import MAX_SEED, PendingStart, SessionStart
from diagd.web.play.uploads import MAX_UPLOAD_BYTES, decode_upload

STATIC = Path(__file__).with_name("static")
MAX_SESSION_BYTES = 4 * 2**20
MAX_SECONDS_OF_UPLOAD = 60.0
MESSAGES_PER_SECOND, BURST = 200.0, 400.0


def create_app(
    scheduler: Scheduler, model: str, context_frames: int, hosts: Collection[str] = ()
) -> Any:
    """Return the ASGI app over a scheduler, which serves turns for as long as the app lives.

    Args:
        model: by which name saved sessions remember the model.
        context_frames: frames of an uploaded clip that a session starts from.
        hosts: names by which the server may be called (see `Guard`).
    """
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.is_file()}
    decoders = asyncio.Semaphore(2)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # few threads: each keeps memory of its own, and PyTorch's threads besides
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        turns = asyncio.create_task(scheduler.run())
        try:
            yield
        finally:
            turns.cancel()
            await asyncio.wait([turns])

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page() -> Response:
        return Response(files["index.html"], media_type="text/html")

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return Response(files[name], media_type=mimetypes.guess_type(name)[0])

    @app.get("/scenes/{number}.jpg")
    async def scene(number: int) -> Response:
        if not 0 <= number < len(scheduler.scenes):
            raise HTTPException(404, "there is no such scene")
        return Response(scheduler.scenes[number].picture, media_type="image/jpeg")

    @app.post("/sessions/{name}/start")
    async def start(name: str, request: Request, seed: int = 0) -> dict[str, int]:
        player = _player(scheduler, name)
        with _only_upload(player):
            data = await _body(request, MAX_UPLOAD_BYTES)
            size = scheduler.world.frame_size_px
            async with decoders:
                frames = await decode_upload(data, context_frames, *size)
            # nobody knows what was done between the frames of a clip: nothing, says the first name
            actions = (player.idle_action,) * (len(frames) - 1)
            scheduler.begin(player, PendingStart(SessionStart(frames, actions, seed)))
        return {"frames": len(frames)}

    @app.post("/sessions/{name}/replay")
    async def replay(name: str, request: Request) -> dict[str, int]:
        player = _player(scheduler, name)
        with _only_upload(player):
            data = await _body(request, MAX_SESSION_BYTES)
            saved = await asyncio.to_thread(_parse_session, data, scheduler)
            scheduler.begin(player, saved)
        return {"frames": len(saved.replay)}

    @app.get("/sessions/{name}/session.json")
    async def session(name: str) -> Response:
        player = _player(scheduler, name, also_gone=True)
        dream = player.session or player.past
        if dream is None:
            raise HTTPException(409, "the dream has not begun yet")
        document = await asyncio.to_thread(save, dream, model)
        return _download(json.dumps(document).encode(), "application/json", "dream.json")

    @app.get("/sessions/{name}/video.mp4")
    async def video(name: str) -> Response:
        player = _player(scheduler, name, also_gone=True)
        pictures = list(player.recorded)
        if not pictures:
            raise HTTPException(409, "nothing was recorded yet")
        async with decoders:
            data = await asyncio.to_thread(to_mp4, pictures, player.fps)
        return _download(data, "video/mp4", "dream.mp4")

    @app.websocket("/play")
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        player = scheduler.join()
        if player is None:
            text = "Even the line is full. This page tries again by itself."
            await socket.send_json({"type": "refused", "message": text})
            await socket.close(TRY_LATER)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(_receive(socket, player, scheduler))
                await _send(socket, player, scheduler)
                receiving.cancel()
        except* WebSocketDisconnect:
            pass  # the page is gone
        finally:
            scheduler.leave(player)

    return Guard(app, hosts)


async def _send(socket: WebSocket, player: Player, scheduler: Scheduler) -> None:
    """Send what is in the outbox, until a note closes the socket; nobody else writes to it."""
    while True:
        item = await player.outbox.get()
        started = time.perf_counter()
        if isinstance(item, Frame):
            await socket.send_bytes(pack(item.header, item.picture))
            player.send_ms = (time.perf_counter() - started) * 1e3
        elif isinstance(item, Welcome):
            await socket.send_json(_welcome(scheduler, player))
        else:
            await socket.send_json(item.document)
            if item.code is not None:
                await socket.close(item.code)
                return


async def _receive(socket: WebSocket, player: Player, scheduler: Scheduler) -> None:
    """Follow messages; the first one that is wrong, or one too many, ends the dream.

    One that answers a frame does not count: there are as many as the model writes.
    """
    allowance, last = BURST, time.monotonic()
    while True:
        received = await socket.receive()
        if received["type"] != "websocket.receive":
            raise WebSocketDisconnect(received.get("code", 1005))
        now = time.monotonic()
        allowance = min(BURST, allowance + (now - last) * MESSAGES_PER_SECOND) - 1
        last = now
        try:
            if allowance < 0:
                raise ValueError("too many messages")
            seen = player.seen
            scheduler.take(player, parse(received.get("text") or ""))
            allowance += player.seen > seen
        except ValueError as error:
            scheduler.end(player, f"The page said: {error}.", WRONG)
            return


def _welcome(scheduler: Scheduler, player: Player) -> dict[str, Any]:
    """What a page needs to know before the first frame."""
    world, codec = scheduler.world, scheduler.world.vocabulary
    assert codec is not None
    return {
        "type": "welcome",
        "session": player.id,
        "computed": [world.dtype, world.backend],
        "grid": [world.height, world.width],
        "size_px": list(world.frame_size_px),
        "strategies": _strategies(world, player.controls.strategy),
        "controls": {**vars(player.controls), "paced": player.paced},
        "fps": float(player.fps),
        "model": Path(world.source.name_or_path).name if world.source else None,
        "remembers": world.remembers or world.config.frames_held,
        "keyboard": keyboard_of(codec).document(),
        "scenes": [scene.name for scene in scheduler.scenes],
        "max_seed": MAX_SEED,
        "max_recorded": player.max_recorded,
        "max_upload_bytes": MAX_UPLOAD_BYTES,
    }


def _strategies(world: VideoGenerator, chosen: str) -> list[tuple[str, int | None]]:
    """Name what the page offers, with the steps of a frame where they are known beforehand."""
    grid = TokenGrid(1, world.height, world.width)
    lags = [Diagonal(lag) for lag in (4, 2, 1) if lag <= world.width]
    offered = dict.fromkeys([Raster(), Exact(), *lags, parse_strategy(chosen)])
    return [
        (one.name, one.schedule(grid).num_steps if isinstance(one, Scheduled) else None)
        for one in offered
    ]


def _player(scheduler: Scheduler, name: str, also_gone: bool = False) -> Player:
    if also_gone and name in scheduler.gone:
        return scheduler.gone[name][1]
    if name not in scheduler.players:
        raise HTTPException(404, "this session is over")
    return scheduler.players[name]


@contextmanager
def _only_upload(player: Player) -> Iterator[None]:
    """Hold a player's uploads to one at a time; what is wrong with it is answered in words."""
    if player.uploading:
        raise HTTPException(409, "another upload is under way", {"connection": "close"})
    player.uploading = True
    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    finally:
        player.uploading = False


async def _body(request: Request, limit: int) -> bytes:
    """Read a request's body, at most `limit` bytes and not for ever."""
    data, close = bytearray(), {"connection": "close"}  # nobody reads the rest
    try:
        async with asyncio.timeout(MAX_SECONDS_OF_UPLOAD):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise HTTPException(
                        413, f"a file may have {limit // 2**20} MB, not more", close
                    )
    except TimeoutError:
        raise HTTPException(408, "the upload took too long", close) from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload was broken off", close) from None
    return bytes(data)


def _parse_session(data: bytes, scheduler: Scheduler) -> PendingStart:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("this is no saved dream (expected a JSON file)") from None
    return load(document, scheduler.world)


def _download(data: bytes, media_type: str, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=media_type, headers=headers)
