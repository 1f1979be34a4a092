"""The service: a loaded model, its scheduler, and the routes that turn requests into jobs."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.data.video import encode_video
from diagd.decoding.engine import Batch
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.previews import paint
from diagd.web.guard import read_body, read_json
from diagd.web.model_thread import Painter
from diagd.web.serve.errors import ApiError, refusing
from diagd.web.serve.events import ACCEPTED, event, streamed
from diagd.web.serve.gate import NOTES
from diagd.web.serve.images import (
    IMAGE_REQUEST,
    ImageRequest,
    Pictures,
    base64_of,
    encode,
    image_jobs,
    makes_images,
    size_of,
    usage_of,
)
from diagd.web.serve.metrics import Metrics
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
MAX_CLIP_BYTES = MAX_UPLOAD_BYTES * 4 // 3 + MAX_JSON_BYTES  # as base64, with the other fields
MAX_SECONDS_OF_BODY = 30.0


def name_of(options: ServeOptions) -> str:
    return Path(options.model).name


def check_name(name: str, options: ServeOptions) -> None:
    if name not in (options.model, name_of(options)):
        message = f"no model {name[:80]!r}, expected {name_of(options)}"
        raise ApiError(404, message, "model", "model_not_found")


class Service:
    """A model with its scheduler, from loading to shutdown."""

    def __init__(self, options: ServeOptions, metrics: Metrics | None = None) -> None:
        self.options, self.name = options, name_of(options)
        self.world: VideoGenerator | None = None
        self.scheduler: Scheduler | None = None
        self.thread, self.decoders = ThreadPoolExecutor(1, "model"), asyncio.Semaphore(2)
        self.metrics, self.pictures = metrics or Metrics(), Pictures()

    def load(self) -> tuple[VideoGenerator, Batch]:
        """Load the model and allocate the memory of its batch, in the model's thread."""
        options, device = self.options, device_of(self.options.device)
        given = options.model, device, options.dtype, options.backend
        world = VideoGenerator.from_pretrained(*given, adapter=options.adapter)
        rows, config = options.max_videos, world.config
        slots = config.max_positions + config.num_action_tokens
        if makes_images(world):
            rows *= 2  # images may be guided
            longest = options.max_prompt_tokens + config.frame.one.slots_per_frame
            slots = min(slots, longest)
        return world, Batch(world.model, rows, slots + 1)

    async def start(self) -> None:
        """Load the model; ValueError or OSError if that fails."""
        loop = asyncio.get_running_loop()
        world, batch = await loop.run_in_executor(self.thread, self.load)
        self.world, self.painter = world, Painter(world.model, self.thread)
        self.scheduler = Scheduler(batch, self.thread, self.options.max_waiting)
        self.metrics.scheduler = self.scheduler
        logger.info("loaded", extra={"fields": {"model": self.name, "dtype": world.dtype}})

    async def run(self) -> None:
        """Run the model's jobs."""
        assert self.scheduler is not None
        await self.scheduler.run()

    async def picture(self, update: Update, output_format: str) -> bytes:
        """Return the encoded picture of an update."""
        assert self.world is not None
        pixels = await self.paint(partial(paint, self.world, update.tokens, update.known))
        return await asyncio.to_thread(encode, pixels, output_format)

    def paint(self, painting: Callable[[], Tensor]) -> asyncio.Future[Tensor]:
        """Paint beside the model; with all its threads while it is idle."""
        assert self.scheduler is not None
        return self.painter.submit(painting, is_idle=not self.scheduler.running)

    @contextlib.asynccontextmanager
    async def running(
        self, jobs: list[Job], request: Request
    ) -> AsyncIterator[AsyncIterator[tuple[Job, Update]]]:
        """Run jobs, yielding their updates; cancel them when the client disconnects."""
        assert self.scheduler is not None
        updates, started = jobs[0].updates, time.perf_counter()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            updates.put(None, ApiError(499, "the client disconnected"))

        async def new() -> AsyncIterator[tuple[Job, Update]]:
            left, is_first = sum(len(job.actions) for job in jobs), True
            while left:
                job, update = await updates.take()
                if is_first:
                    self.metrics.first_picture.observe(time.perf_counter() - started)
                is_first, left = False, left - (update.known is None)
                yield job, update

        try:
            with refusing("n"):
                self.scheduler.submit(jobs)
        except BusyError as error:
            raise ApiError(429, str(error), None, "queue_full", error.retry_after) from None
        watching, seconds = asyncio.create_task(watch()), self.options.max_seconds
        late = ApiError(504, f"request took longer than {seconds:g} seconds", None, "timeout")
        timer = asyncio.get_running_loop().call_later(seconds, updates.put, None, late)
        try:
            yield new()
        finally:
            timer.cancel()
            watching.cancel()
            for job in jobs:
                self.scheduler.cancel(job)

    async def image_jobs(self, asked: ImageRequest, request: Request) -> list[Job]:
        """Return the jobs of a request, and note them for the log."""
        notes, options = request.scope[NOTES], self.options
        assert self.world is not None
        if asked.response_format == "url" and not options.is_this_process:
            message = "response_format must be b64_json with several replicas"
            raise ApiError(400, message, "response_format", "invalid_value")
        given = self.world, asked, notes["client"], options.max_prompt_tokens
        jobs = await asyncio.to_thread(image_jobs, *given)
        notes |= {"images": len(jobs), "strategy": jobs[0].strategy.name, "seed": jobs[0].seed}
        if options.log_prompts:
            notes["prompt"] = asked.prompt
        return jobs

    async def continuation(
        self, asked: VideoRequest, data: bytes, request: Request
    ) -> Continuation:
        """Return the job of a request, and note it for the log."""
        notes, world = request.scope[NOTES], self.world
        assert world is not None
        async with self.decoders:
            frames = await decode_clip(world, asked, data)
        given = world, asked, frames, notes["client"], self.options.max_frames
        video = await self.painter.submit(partial(continuation, *given))  # tokenizes the clip
        notes |= {"frames": video.num_frames, "strategy": video.job.strategy.name}
        notes["seed"] = video.job.seed
        return video

    async def video(
        self, asked: VideoRequest, video: Continuation, written: list[Tensor]
    ) -> bytes | list[bytes]:
        """Return the encoded video, or its frames as PNG."""
        assert self.world is not None
        pixels = await self.paint(partial(painted, self.world, video, written))
        if asked.output_format == "frames":
            return await asyncio.to_thread(lambda: [encode(one, "png") for one in pixels])
        suffix = asked.output_format or "mp4"
        return await asyncio.to_thread(encode_video, pixels, video.fps, suffix)

    def add_routes(self, app: FastAPI) -> None:
        """Add the model's routes to an app that handles `ApiError`."""
        service = self

        @app.get("/v1/pictures/{name}")
        async def picture(name: str) -> Response:
            if (found := service.pictures.get(name)) is None:
                raise HTTPException(404, "no such picture, or it has expired")
            return Response(found.data, media_type=found.media_type)

        @app.post("/v1/images/generations")
        async def images(request: Request) -> Response:
            data = await read_body(request, MAX_JSON_BYTES, MAX_SECONDS_OF_BODY)
            with refusing(None):
                asked = read_json(IMAGE_REQUEST, data, "request")
            if asked.model is not None:
                check_name(asked.model, service.options)
            jobs = await service.image_jobs(asked, request)
            if asked.stream:
                return await streamed(image_events(service, asked, jobs, request))
            return JSONResponse(await finished_images(service, asked, jobs, request))

        @app.post("/v1/videos/continuations")
        async def videos(request: Request) -> Response:
            body = await read_body(request, MAX_CLIP_BYTES, MAX_SECONDS_OF_UPLOAD)
            asked, data = await read_request(body, request)
            if asked.model is not None:
                check_name(asked.model, service.options)
            video = await service.continuation(asked, data, request)
            if asked.stream:
                return await streamed(video_events(service, asked, video, request))
            return await finished_video(service, asked, video, request)

    def close(self) -> None:
        """Stop the model's thread and the painter."""
        if self.scheduler is not None:
            self.scheduler.interrupt()
            self.painter.thread.shutdown(wait=True)
        self.thread.shutdown(wait=True)


async def finished_video(
    service: Service, asked: VideoRequest, video: Continuation, request: Request
) -> Response:
    """Respond with the file, or with all frames as pictures."""
    async with service.running([video.job], request) as updates:
        written = [update.tokens async for _, update in updates]
        made = await service.video(asked, video, written)
    about = {"seed": video.job.seed, "fps": video.fps, "notes": video.notes}
    if isinstance(made, list):
        pictures = [{"b64_json": base64_of(picture)} for picture in made]
        return JSONResponse({"created": int(time.time()), **about, "data": pictures})
    # JSON escapes what headers cannot hold
    headers = {f"x-diagd-{name}": json.dumps(value) for name, value in about.items()}
    return Response(made, media_type=MEDIA_TYPES[asked.output_format or "mp4"], headers=headers)


async def video_events(
    service: Service, asked: VideoRequest, video: Continuation, request: Request
) -> AsyncIterator[bytes]:
    """Respond with an event after each grid of frames, and one for the video."""
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
    """Respond with all images at once."""
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
    """Respond with an event for each preview and each image."""
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
