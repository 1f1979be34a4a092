"""Walk through a generated world in the browser: its pages, the socket of each player, uploads.

diagd play                      # the bundled world, on http://127.0.0.1:8421
diagd play --model PATH --device cuda
"""

import asyncio
import contextlib
import gc
import logging
import mimetypes
import socket
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from diagd.backends.devices import device_of
from diagd.backends.webgpu.model import WebGPUModel
from diagd.console import make_console, waiting
from diagd.decoding.engine import Batch
from diagd.files import write_bytes
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import likeness_notes
from diagd.pipeline.scenes import StartScene
from diagd.web.guard import Keys, listen, locked, read_body, server_config, url_of
from diagd.web.play.export import STATIC
from diagd.web.play.export import pack as pack_world
from diagd.web.play.front import Front
from diagd.web.play.messages import (
    MAX_MESSAGE_BYTES,
    Frame,
    Refused,
    Replaying,
    Start,
    Step,
    Uploaded,
    pack,
    parse,
    to_json,
)
from diagd.web.play.options import PlayOptions, WorldFlags
from diagd.web.play.player import Player, to_jpeg, to_mp4
from diagd.web.play.scheduler import TRY_LATER, WRONG, Scheduler
from diagd.web.play.session import (
    Controls,
    Session,
    SessionLog,
    load_log,
    memory_of,
    name_of,
    save_log,
)
from diagd.web.play.welcome import opening, strategy_of
from diagd.web.replicas import Replicas, kept_signals
from diagd.web.uploads import MAX_SECONDS_OF_UPLOAD, MAX_UPLOAD_BYTES, decode_upload

logger = logging.getLogger("diagd.play")
TYPES = mimetypes.MimeTypes()  # without the machine's own: Windows may take a script for text
MAX_SESSION_BYTES = 4 * 2**20
MESSAGES_PER_SECOND, BURST = 200.0, 400.0


def play(options: PlayOptions) -> dict[str, Any]:
    """Serve until Ctrl-C; returns how many sessions and frames there were."""
    with listen(options.host, options.port) as listening:
        with waiting("loading the model"):
            played, server = (load if options.is_this_process else load_replicas)(options)
        url = url_of(*listening.getsockname()[:2])
        make_console().print(f"dreaming at {url} in {played.computed} (Ctrl-C ends it)")
        if options.open:  # the socket listens already: a page waits until the server runs
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt), short_collections():
            server.run(sockets=[listening])
    return {"url": url, "sessions": played.sessions, "frames": played.frames}


def load(options: PlayOptions) -> tuple[Scheduler, uvicorn.Server]:
    """Load the model and its scenes, warm it up, and return the server, not yet running."""
    scheduler, app = load_app(options)
    return scheduler, PlayServer(play_config(app, options), scheduler, options.recordings)


def load_replicas(options: PlayOptions) -> tuple[Front, uvicorn.Server]:
    """Start replicas, which load the model, and return the server before them."""
    front = Front(Replicas(make_world, options, "play"))
    with kept_signals():
        front.replicas.start()
    return front, uvicorn.Server(play_config(front, options))


def play_config(app: ASGIApp, options: PlayOptions) -> uvicorn.Config:
    keys = Keys(options.keys())
    return server_config(
        locked(app, keys) if keys.names else app,
        (options.host, *options.allow_host),
        ws="websockets-sansio",
        ws_max_size=4 * MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # JPEG does not shrink
        timeout_graceful_shutdown=2,
    )


async def make_world(options: PlayOptions) -> tuple[FastAPI, asyncio.Task[None]]:
    """Load the model and its scenes in a replica; return its app, and the task that runs it."""
    _, app = await asyncio.to_thread(load_app, options)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            with short_collections():
                await asyncio.Event().wait()

    return app, asyncio.create_task(run())


def load_app(options: PlayOptions) -> tuple[Scheduler, FastAPI]:
    device, strategy = device_of(options.device), strategy_of(options)
    given = options.model, device, options.dtype, options.backend
    world = VideoGenerator.from_pretrained(*given, adapter=options.adapter)
    world.remembers = options.remember or world.remembers
    if world.vocabulary is None or not world.defaults.context_frames:
        kind = "takes no actions" if world.vocabulary is None else "makes single images"
        raise ValueError(
            f"{options.model} {kind}, so there is nothing to play: "
            "diagd generate shows what it dreams"
        )
    controls, context_frames, scenes = opening(world, options, strategy)
    warm_up(world, scenes[0], controls)
    batch = shared_batch(world, scenes[0], controls, options.max_sessions)
    limits = options.max_sessions, options.idle_seconds
    scheduler = Scheduler(world, scenes, *limits, controls, batch)
    return scheduler, create_app(scheduler, options, context_frames)


def warm_up(world: VideoGenerator, scene: StartScene, controls: Controls) -> None:
    """Generate two frames, so that everything is built before the first player comes."""
    assert world.vocabulary is not None
    session = Session(world, SessionLog(scene.frames, scene.actions, 0))
    for _ in range(2):
        world.tokenizer.decode(session.advance(world.vocabulary.names[0], controls))


SHARED_SHARE = 0.9  # of the time that players take in turns, above which sharing does not pay


def shared_batch(
    world: VideoGenerator, scene: StartScene, controls: Controls, max_sessions: int
) -> Batch | None:
    """Return memory of steps that players share, or None where they are faster in turns.

    Frames of four players, or as many as may come, are timed side by side and one by one.
    """
    count = min(max_sessions, 4)
    if count < 2 or isinstance(world.model, WebGPUModel):
        return None
    assert world.vocabulary is not None
    batch, action = memory_of(world, count), world.vocabulary.names[0]
    log = SessionLog(scene.frames, scene.actions, 0)
    sessions = [Session(world, log, batch) for _ in range(count)]
    alone = sessions[0]

    def seconds(playing: list[Session]) -> float:
        started = time.perf_counter()
        for session in playing:
            session.begin(action, controls)
        while not all(session.is_whole for session in playing):
            batch.step()
        for session in playing:
            session.finish()
        return time.perf_counter() - started

    for playing in (sessions, [alone]):
        seconds(playing)  # reads the scene, and captures steps
    together, apart = zip(*((seconds(sessions), seconds([alone])) for _ in range(3)), strict=True)
    share = min(together) / (count * min(apart))
    logger.info("a frame of %d players takes %.2f of the time of %d frames", count, share, count)
    del sessions, alone
    return memory_of(world, max_sessions) if share < SHARED_SHARE else None


class PlayServer(uvicorn.Server):
    """Saves what is being recorded, in a folder, when it is told to end (SIGTERM, Ctrl-C)."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, recordings: Path) -> None:
        super().__init__(config)
        self.scheduler, self.recordings = scheduler, recordings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        players = self.scheduler.players.values()
        cut = [(one.recorded, one.fps) for one in players if one.recording and one.recorded]
        await super().shutdown(sockets)
        for number, (pictures, fps) in enumerate(cut, start=1):
            path = self.recordings / f"dream-{time.strftime('%Y%m%d-%H%M%S')}-{number}.mp4"
            try:
                write_bytes(path, await asyncio.to_thread(to_mp4, pictures, fps))
            except OSError as error:
                logger.error("a recording of %d frames is lost: %s", len(pictures), error)
            else:
                logger.warning("a recording was cut short: %s", path)


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Exempt all objects made before from Python's collections, which took 0.2 s of a turn."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left: a full collection is due when that has grown by a quarter
    try:
        yield
    finally:
        gc.unfreeze()


def create_app(scheduler: Scheduler, flags: WorldFlags, context_frames: int) -> FastAPI:
    """Build the app; of an uploaded clip (`MAX_UPLOAD_FRAMES`), the last `context_frames` count."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # few threads: each keeps memory of its own, and PyTorch's threads besides
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        turns = asyncio.create_task(scheduler.run())
        try:
            yield
        finally:
            turns.cancel()
            await asyncio.wait([turns])

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _add_sessions(app, scheduler, context_frames)
    _add_socket(app, scheduler)
    _add_files(app, scheduler, replace(flags, strategy=None, context_frames=context_frames))
    return app


def _add_sessions(app: FastAPI, scheduler: Scheduler, context_frames: int) -> None:
    """Add what a session uploads and downloads."""
    world, decoders = scheduler.world, asyncio.Semaphore(2)
    source = world.source
    assert source is not None

    @app.post("/sessions/{name}/start")
    async def start(name: str, request: Request, seed: int = 0) -> Uploaded:
        player = _player(scheduler.players, name)
        async with _upload(player, request, MAX_UPLOAD_BYTES) as data:
            async with decoders:
                fit, fps = world.tokenizer.fit_frames, world.defaults.fps
                size_px = world.frame_size_px
                frames = await decode_upload(data, context_frames, *size_px, fps, fit)
            seen = world.tokenizer, source.folder, frames[-1]
            notes = await asyncio.to_thread(likeness_notes, *seen)
            actions = (player.keys.idle,) * (len(frames) - 1)  # a clip has none of its own
            scheduler.begin(player, SessionLog(frames, actions, seed))
        return Uploaded(len(frames), notes)

    @app.post("/sessions/{name}/replay")
    async def replay(name: str, request: Request) -> Replaying:
        player = _player(scheduler.players, name)
        async with _upload(player, request, MAX_SESSION_BYTES) as data:
            saved = await asyncio.to_thread(load_log, data, world, scheduler.scenes)
            scheduler.begin(player, saved)
        return Replaying(len(saved.history), saved.name)

    @app.get("/sessions/{name}/session.json")
    async def session(name: str) -> Response:
        player = _player(scheduler.players | scheduler.gone, name)
        # what is about to begin comes first, and is read first: the model's thread may make room
        log = player.pending or (begun.log if (begun := player.session) else player.past)
        if log is None:
            raise HTTPException(409, "the dream has not begun yet")
        data = await asyncio.to_thread(save_log, log, name_of(world))
        return _download(data, "application/json", "dream.json")

    @app.get("/sessions/{name}/video.mp4")
    async def video(name: str) -> Response:
        player = _player(scheduler.players | scheduler.gone, name)
        if not (recorded := list(player.recorded)):
            raise HTTPException(409, "nothing was recorded yet")
        async with decoders:
            data = await asyncio.to_thread(to_mp4, recorded, player.fps)
        return _download(data, "video/mp4", "dream.mp4")


def _add_socket(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the socket on which a session is played."""

    @app.websocket("/play")
    async def play(socket: WebSocket) -> None:
        await socket.accept()
        if (player := scheduler.join()) is None:
            refused = Refused("Even the line is full. This page tries again by itself.")
            await socket.send_text(to_json(refused))
            await socket.close(TRY_LATER)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(_receive(socket, player, scheduler))
                await _send(socket, player)
                receiving.cancel()
        except* WebSocketDisconnect:
            pass  # the page is gone
        finally:
            scheduler.leave(player)


def _add_files(app: FastAPI, scheduler: Scheduler, packed: WorldFlags) -> None:
    """Add the page, pictures of scenes, and the world for a browser that runs it itself."""
    files = {f"static/{path.name}": path.read_bytes() for path in STATIC.iterdir()}
    for number, scene in enumerate(scheduler.scenes):
        files[f"scenes/{number}.jpg"] = to_jpeg(scene.frames[-1])
    packing: list[asyncio.Task[dict[str, bytes]]] = []  # once, when first asked for

    @app.get("/{path:path}")  # whatever no other route answers
    async def file(path: str) -> Response:
        found, name = files, path or "static/index.html"
        if path.startswith("world/"):
            if not packing:
                packing.append(asyncio.create_task(asyncio.to_thread(pack_world, packed)))
            try:
                found = await asyncio.shield(packing[0])  # others may wait for it, too
            except ValueError as error:
                raise HTTPException(409, str(error)) from None
        if name not in found:
            raise HTTPException(404, "no such file")
        return Response(found[name], media_type=TYPES.guess_type(name)[0])


async def _send(socket: WebSocket, player: Player) -> None:
    """Send what is in the outbox, until a note closes the socket; nobody else writes to it."""
    while True:
        await asyncio.sleep(0)  # a line that broke is heard of, before more is written to it
        note = await player.outbox.get()
        started = time.perf_counter()
        if isinstance(note.message, Start | Frame):
            await socket.send_bytes(pack(note.message, note.picture))
            player.send_ms = (time.perf_counter() - started) * 1e3
        else:
            await socket.send_text(to_json(note.message))
        if note.code is not None:
            await socket.close(note.code)
            return


async def _receive(socket: WebSocket, player: Player, scheduler: Scheduler) -> None:
    """Handle messages; the first one that is wrong, or one too many, ends the dream."""
    codec = scheduler.world.vocabulary
    assert codec is not None
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
            message = parse(received.get("text") or "", codec)
            scheduler.handle(player, message)
            # as many as the model writes frames: these are free
            allowance += player.seen > seen or isinstance(message, Step)
        except ValueError as error:
            scheduler.end(player, f"The page said: {error}.", WRONG)
            return


def _player(players: dict[str, Player], name: str) -> Player:
    if name not in players:
        raise HTTPException(404, "this session is over")
    return players[name]


@contextlib.asynccontextmanager
async def _upload(player: Player, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Read an upload, the only one of its player, and answer a ValueError with its text."""
    if player.uploading:
        raise HTTPException(409, "another upload is under way", {"connection": "close"})
    player.uploading = True
    try:
        yield await read_body(request, max_bytes, MAX_SECONDS_OF_UPLOAD)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    finally:
        player.uploading = False


def _download(data: bytes, media_type: str, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=media_type, headers=headers)
