"""Videos that continue a clip or a picture: requests and their jobs."""

import base64
import binascii
from email.message import Message
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Message as ASGIMessage
from torch import Tensor

from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import check_held, likeness_notes
from diagd.web.guard import STRICT, read_json
from diagd.web.serve.errors import ApiError, refusing
from diagd.web.serve.images import makes_images
from diagd.web.serve.scheduler import Job
from diagd.web.serve.settings import Settings
from diagd.web.uploads import decode_upload

MAX_ACTIONS = 10_000  # characters
MAX_FIELDS = 20
MEDIA_TYPES = {"mp4": "video/mp4", "webp": "image/webp", "gif": "image/gif"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VideoRequest(Settings):
    """A request to continue a clip, in the names of `diagd generate`."""

    clip: str  # base64 or a data: URL; in a form, the file
    frames: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # to generate
    context_frames: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # the last ones of the clip
    actions: Annotated[str, Field(max_length=MAX_ACTIONS)] | None = None  # such as forward*8,left*4
    context_actions: Annotated[str, Field(max_length=MAX_ACTIONS)] | None = None
    output_format: Literal["mp4", "webp", "gif", "frames"] | None = None


VIDEO_REQUEST = TypeAdapter(VideoRequest)


class Continuation(NamedTuple):
    """A video to generate."""

    job: Job
    context: Tensor  # (m, height, width) int64, the context
    num_frames: int
    fps: float
    notes: list[str]  # what was done without being asked for


async def read_request(body: bytes, request: Request) -> tuple[VideoRequest, bytes]:
    """Read a body, JSON or a form; return the request and the bytes of the clip."""
    kind = Message()
    kind["content-type"] = request.headers.get("content-type", "")
    if kind.get_content_type() != "multipart/form-data":
        with refusing(None):
            asked = read_json(VIDEO_REQUEST, body, "request")
        data = asked.clip.partition(",")[2] if asked.clip.startswith("data:") else asked.clip
        try:
            return asked, base64.b64decode(data, validate=True)
        except binascii.Error:
            raise ApiError(400, "clip is not base64", "clip", "invalid_value") from None

    async def receive() -> ASGIMessage:
        return {"type": "http.request", "body": body}

    whole = Request(request.scope, receive)  # the size was checked before
    limits = {"max_files": 1, "max_fields": MAX_FIELDS, "max_part_size": MAX_ACTIONS}
    with refusing(None):  # older Starlettes leave errors of the parser to us
        async with whole.form(**limits) as form:
            clip = form.get("clip")
            data = await clip.read() if isinstance(clip, UploadFile) else b""
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
        asked = read_json(VIDEO_REQUEST, {"clip": "", **fields}, "request")
    return asked, data


async def decode_clip(world: VideoGenerator, asked: VideoRequest, data: bytes) -> Tensor:
    """Return the frames that the model sees, (m, H_px, W_px, 3) uint8 of its size."""
    if makes_images(world):
        message = "this model makes images: use /v1/images/generations"
        raise ApiError(400, message, "model", "wrong_model")
    wanted = asked.context_frames or world.defaults.context_frames
    if wanted >= world.config.frames_held * world.tokenizer.temporal_compression:
        with refusing("context_frames"):
            raise ValueError(f"context_frames={wanted} leaves no room for a frame")
    with refusing("clip"):
        fit, fps = world.tokenizer.fit_frames, world.defaults.fps
        frames = await decode_upload(data, wanted, *world.frame_size_px, fps, fit)
    return frames[(len(frames) - 1) % world.tokenizer.temporal_compression :]


def continuation(
    world: VideoGenerator, asked: VideoRequest, frames: Tensor, client: str, max_frames: int
) -> Continuation:
    """Return the job of a request; ApiError if it does not fit the model."""
    num_frames = asked.frames or world.defaults.num_frames
    with refusing("frames"):
        if num_frames > max_frames:
            raise ValueError(f"frames must be at most {max_frames}, got {num_frames}")
        num_grids = world.num_grids(num_frames)
    with refusing("context_actions"):
        prompt = world.read_prompt(frames, asked.context_actions)
        tokens, grids = world.prompt(prompt.frames, prompt.context_actions)
    with refusing("frames"):
        held = world.config.frames_held
        check_held(world.tokenizer, held, len(frames), len(grids), num_frames)
    with refusing("actions"):
        actions = world.action_ids(asked.actions, num_grids, "generated frame")[0]
    strategy, sampling = asked.writing(world)
    notes = [*prompt.notes]
    if world.source is not None:
        notes += likeness_notes(world.tokenizer, world.source.folder, prompt.frames[-1])
    job = Job(
        prompt=tokens[0],
        context_frames=len(grids),
        actions=actions,
        frame=world.config.frame,
        strategy=strategy,
        sampling=sampling,
        seed=asked.seed_or_random(),
        model=world.model,
        window=world.window(len(grids)),
        client=client,
    )
    return Continuation(job, grids, num_frames, prompt.fps, notes)


def painted(world: VideoGenerator, asked: Continuation, written: list[Tensor]) -> Tensor:
    """Return the frames of the generated grids, (T, H_px, W_px, 3) uint8."""
    grids = torch.stack(written).to(asked.context.device)
    return world.tokenizer.decode_after(asked.context, grids)[-asked.num_frames :].cpu()
