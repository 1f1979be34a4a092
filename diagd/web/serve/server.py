"""Serve a model to programs: images by OpenAI's API, videos that go on from a clip.

diagd serve --model deepseek-ai/Janus-Pro-1B
diagd serve --model PATH --host 0.0.0.0 --api-keys keys.txt
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.console import make_console
from diagd.data.video import encode_video
from diagd.decoding.engine import Batch
from diagd.pipeline.generator import VideoGenerator
from diagd.web.guard import listen, read_body, read_json, server_config, url_of
from diagd.web.model_thread import Painter
from diagd.web.serve.errors import ApiError, answer_api_error, answer_http_error, refusing
from diagd.web.serve.gate import NOTES, Gate, JsonLines
from diagd.web.serve.images import (
    IMAGE_REQUEST,
    ImageRequest,
    Pictures,
    base64_of,
    encode,
    event,
    image_jobs,
    makes_images,
    paint,
    size_of,
    usage_of,
)
from diagd.web.serve.metrics import MEDIA_TYPE, Metrics
from diagd.web.serve.options import ServeOptions
from diagd.web.serve.scheduler import BusyError, Job, Scheduler, Update
from diagd.web.serve.videos import (
    MEDIA_TYPES,
    Continuation,
    VideoRequest,
    continuation,
    decode_clip,
    painted,
    read_request,
)
from diagd.web.uploads import MAX_SECONDS_OF_UPLOAD, MAX_UPLOAD_BYTES

logger = logging.getLogger("diagd.serve")
MAX_JSON_BYTES = 256 * 2**10
MAX_CLIP_BYTES = MAX_UPLOAD_BYTES * 4 // 3 + MAX_JSON_BYTES  # as base64, with what else is asked
MAX_SECONDS_OF_BODY = 30.0
ACCEPTED = b": accepted\n\n"  # a comment among events


def serve(options: ServeOptions) -> dict[str, Any]:
    """Serve until it is told to end; returns how many frames were written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with listen(options.host, options.port) as listening:
        server = ServeServer(options)
        url = url_of(*listening.getsockname()[:2])
        make_console().print(f"serving {options.model} at {url}/v1 (Ctrl-C ends it)")
        server.run(sockets=[listening])
    if server.service.failure is not None:
        raise server.service.failure
    scheduler = server.service.scheduler
    return {"url": url, "frames": 0 if scheduler is None else scheduler.num_frames}


class Service:
    """The model that is served, from when it is loaded to the end."""

    def __init__(self, options: ServeOptions) -> None:
        self.options, self.name = options, Path(options.model).name
        self.created = int(time.time())
        self.world: VideoGenerator | None = None
        self.scheduler: Scheduler | None = None
        self.failure: Exception | None = None  # of loading
        self.thread, self.decoders = ThreadPoolExecutor(1, "model"), asyncio.Semaphore(2)
        self.metrics, self.pictures = Metrics(lambda: self.scheduler), Pictures()
        self.app = create_app(self)
        self.gate = Gate(self.app, options.keys(), self.metrics)

    def load(self) -> tuple[VideoGenerator, Batch]:
        """Load the model and allocate the memory of its batch, in the model's thread."""
        options, device = self.options, device_of(self.options.device)
        given = options.model, device, options.dtype, options.backend
        world = VideoGenerator.from_pretrained(*given)
        rows, config = options.max_videos, world.config
        slots = config.max_positions + config.num_action_tokens
        if makes_images(world):
            rows *= 2  # for they may be guided
            longest = options.max_prompt_tokens + config.frame.one.slots_per_frame
            slots = min(slots, longest)
        return world, Batch(world.model, rows, slots + 1)

    async def run(self) -> None:
        """Load the model, then run its jobs."""
        loop = asyncio.get_running_loop()
        try:
            world, batch = await loop.run_in_executor(self.thread, self.load)
        except (ValueError, OSError, RuntimeError) as error:
            self.failure = error
            return
        self.world, self.painter = world, Painter(world.model, self.thread)
        self.scheduler = Scheduler(batch, self.thread, self.options.max_waiting)
        self.gate.state = "ready"
        logger.info("ready", extra={"fields": {"model": self.name, "dtype": world.dtype}})
        await self.scheduler.run()

    async def picture(self, update: Update, output_format: str) -> bytes:
        """Return the file of an image, or of what is written of it."""
        assert self.world is not None
        pixels = await self.paint(partial(paint, self.world, update))
        return await asyncio.to_thread(encode, pixels, output_format)

    def paint(self, painting: Callable[[], Tensor]) -> asyncio.Future[Tensor]:
        """Paint beside the model, or with all its threads while nothing is written."""
        assert self.scheduler is not None
        return self.painter.submit(painting, is_idle=not self.scheduler.running)

    @contextlib.asynccontextmanager
    async def running(
        self, jobs: list[Job], request: Request
    ) -> AsyncIterator[AsyncIterator[tuple[Job, Update]]]:
        """Run jobs as long as their client waits; yields what is new of them."""
        assert self.scheduler is not None
        updates, started = jobs[0].updates, time.perf_counter()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            updates.put(None, ApiError(499, "the client went away"))

        async def new() -> AsyncIterator[tuple[Job, Update]]:
            left, is_first = sum(len(job.actions) for job in jobs), True
            while left:
                job, update = await updates.take()
                if is_first:
                    self.metrics.first_picture.observe(time.perf_counter() - started)
                is_first, left = False, left - (update.known is None)
                yield job, update

        try:
            self.scheduler.submit(jobs)
        except BusyError as error:
            raise ApiError(429, str(error), None, "queue_full", error.retry_after) from None
        watching, seconds = asyncio.create_task(watch()), self.options.max_seconds
        late = ApiError(504, f"it took longer than {seconds:g} seconds", None, "timeout")
        timer = asyncio.get_running_loop().call_later(seconds, updates.put, None, late)
        try:
            yield new()
        finally:
            timer.cancel()
            watching.cancel()
            for job in jobs:
                self.scheduler.cancel(job)

    def check_name(self, name: str) -> None:
        if name not in (self.name, self.options.model):
            message = f"there is no model {name[:80]!r} here, but {self.name}"
            raise ApiError(404, message, "model", "model_not_found")

    async def image_jobs(self, asked: ImageRequest, request: Request) -> list[Job]:
        """Return the jobs of a request, which its line in the log tells of."""
        notes, options = request.scope[NOTES], self.options
        assert self.world is not None
        given = self.world, asked, notes["client"], options.max_prompt_tokens
        jobs = await asyncio.to_thread(image_jobs, *given)
        notes |= {"images": len(jobs), "strategy": jobs[0].strategy.name, "seed": jobs[0].seed}
        if options.log_prompts:
            notes["prompt"] = asked.prompt
        return jobs

    async def continuation(
        self, asked: VideoRequest, data: bytes, request: Request
    ) -> Continuation:
        """Return the job of a request, which its line in the log tells of."""
        notes, world = request.scope[NOTES], self.world
        assert world is not None
        async with self.decoders:
            frames = await decode_clip(world, asked, data)
        given = world, asked, frames, notes["client"], self.options.max_frames
        video = await self.painter.submit(partial(continuation, *given))  # its clip is tokenized
        notes |= {"frames": video.num_frames, "strategy": video.job.strategy.name}
        notes["seed"] = video.job.seed
        return video

    async def video(
        self, asked: VideoRequest, video: Continuation, written: list[Tensor]
    ) -> bytes | list[bytes]:
        """Return the file of a video, or its frames as PNG."""
        assert self.world is not None
        pixels = await self.paint(partial(painted, self.world, video, written))
        if asked.output_format == "frames":
            return await asyncio.to_thread(lambda: [encode(one, "png") for one in pixels])
        suffix = asked.output_format or "mp4"
        return await asyncio.to_thread(encode_video, pixels, video.fps, suffix)

    def close(self) -> None:
        """End what runs in the model's thread, and beside it."""
        if self.scheduler is not None:
            self.scheduler.interrupt()
            self.painter.thread.shutdown(wait=True)
        self.thread.shutdown(wait=True)


class ServeServer(uvicorn.Server):
    """Lets requests under way end before it does, at the first SIGTERM or Ctrl-C."""

    def __init__(self, options: ServeOptions) -> None:
        self.service = Service(options)
        self.drained_at = float("inf")
        names = (options.host, *options.allow_host)
        app: Any = self.service.gate
        if options.cors:
            app = CORSMiddleware(app, options.cors, allow_methods=["*"], allow_headers=["*"])
        settings = {"ws": "none", "timeout_graceful_shutdown": 2, "root_path": options.root_path}
        super().__init__(server_config(app, names, options.cors, **settings))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.gate.state != "ready":
            super().handle_exit(sig, frame)
        self.service.gate.state = "draining"
        self.drained_at = time.monotonic() + self.service.options.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        gate = self.service.gate
        is_drained = gate.state == "draining" and not gate.num_open
        is_over = is_drained or time.monotonic() > self.drained_at
        return await super().on_tick(counter) or is_over or self.service.failure is not None


def create_app(service: Service) -> FastAPI:
    """Build the routes of a service, which answer when its model is loaded."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])
            service.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "diagd"}

    @app.get("/health")
    async def health() -> JSONResponse:
        state = service.gate.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return model

    @app.get("/v1/pictures/{name}")
    async def picture(name: str) -> Response:
        if (found := service.pictures.get(name)) is None:
            raise HTTPException(404, "there is no such picture, or no longer")
        return Response(found.data, media_type=found.media_type)

    @app.post("/v1/images/generations")
    async def images(request: Request) -> Response:
        data = await read_body(request, MAX_JSON_BYTES, MAX_SECONDS_OF_BODY)
        with refusing(None):
            asked = read_json(IMAGE_REQUEST, data, "request")
        if asked.model is not None:
            service.check_name(asked.model)
        jobs = await service.image_jobs(asked, request)
        if asked.stream:
            return await streamed(image_events(service, asked, jobs, request))
        return JSONResponse(await finished_images(service, asked, jobs, request))

    @app.post("/v1/videos/continuations")
    async def videos(request: Request) -> Response:
        body = await read_body(request, MAX_CLIP_BYTES, MAX_SECONDS_OF_UPLOAD)
        asked, data = await read_request(body, request)
        if asked.model is not None:
            service.check_name(asked.model)
        video = await service.continuation(asked, data, request)
        if asked.stream:
            return await streamed(video_events(service, asked, video, request))
        return await finished_video(service, asked, video, request)

    return app


async def finished_video(
    service: Service, asked: VideoRequest, video: Continuation, request: Request
) -> Response:
    """Answer with the file, or with all frames as pictures."""
    async with service.running([video.job], request) as updates:
        written = [update.tokens async for _, update in updates]
        made = await service.video(asked, video, written)
    about = {"seed": video.job.seed, "fps": video.fps, "notes": video.notes}
    if isinstance(made, list):
        pictures = [{"b64_json": base64_of(picture)} for picture in made]
        return JSONResponse({"created": int(time.time()), **about, "data": pictures})
    # of notes, which are words of ours, letters that headers have not are escaped
    headers = {f"x-diagd-{name}": json.dumps(value) for name, value in about.items()}
    return Response(made, media_type=MEDIA_TYPES[asked.output_format or "mp4"], headers=headers)


async def video_events(
    service: Service, asked: VideoRequest, video: Continuation, request: Request
) -> AsyncIterator[bytes]:
    """Answer with an event as each grid of frames is written, and for the whole."""
    about = {"seed": video.job.seed, "fps": video.fps, "notes": video.notes}
    written, count = list[Tensor](), len(video.job.actions)
    async with service.running([video.job], request) as updates:
        yield ACCEPTED
        async for _, update in updates:
            written.append(update.tokens)
            yield event("video_continuation.progress", {"written": len(written), "of": count})
        made = await service.video(asked, video, written)
    for number, picture in enumerate(made if isinstance(made, list) else []):
        told = {"frame": number, "b64_json": base64_of(picture)}
        yield event("video_continuation.frame", told)
    if isinstance(made, bytes):
        about["b64_json"] = base64_of(made)
    yield event("video_continuation.completed", {"created_at": int(time.time()), **about})


async def finished_images(
    service: Service, asked: ImageRequest, jobs: list[Job], request: Request
) -> dict[str, Any]:
    """Answer with all images at once."""
    assert service.world is not None
    kind, pictures = asked.output_format or "png", dict[int, bytes]()
    async with service.running(jobs, request) as updates:
        async for job, update in updates:
            pictures[job.number] = await service.picture(update, kind)
    data = list[dict[str, Any]]()
    for job in jobs:
        picture, one = pictures[job.number], dict[str, Any](seed=job.seed)
        if asked.response_format == "url":
            name = service.pictures.keep(picture, kind)
            one["url"] = str(request.url_for("picture", name=name))
        else:
            one["b64_json"] = base64_of(picture)
        data.append(one)
    about = {"created": int(time.time()), "background": "opaque", "output_format": kind}
    return {**about, "size": size_of(service.world), "data": data, "usage": usage_of(jobs)}


async def image_events(
    service: Service, asked: ImageRequest, jobs: list[Job], request: Request
) -> AsyncIterator[bytes]:
    """Answer with an event for each preview, and for each image."""
    assert service.world is not None
    kind = asked.output_format or "png"
    about = {"size": size_of(service.world), "output_format": kind}
    about |= {"background": "opaque", "quality": "auto"}
    numbers = dict.fromkeys(range(len(jobs)), 0)
    async with service.running(jobs, request) as updates:
        yield ACCEPTED
        async for job, update in updates:
            picture = base64_of(await service.picture(update, kind))
            told = {"b64_json": picture, "created_at": int(time.time()), **about}
            told |= {"index": job.number, "seed": job.seed}
            if update.known is not None:
                told["partial_image_index"] = numbers[job.number]
                numbers[job.number] += 1
                yield event("image_generation.partial_image", told)
            else:
                told["usage"] = usage_of([job])
                yield event("image_generation.completed", told)


async def streamed(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Answer with events; what is refused before the first is refused by its status."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        try:
            async for one in events:
                yield one
        except ApiError as error:
            yield b"event: error\ndata: " + json.dumps(error.document).encode() + b"\n\n"

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # of nginx
    return StreamingResponse(all_of_them(), media_type="text/event-stream", headers=headers)
