"""Images by OpenAI's API: requests, their jobs, previews and encoded pictures."""

import base64
import io
import secrets
import time
from collections import OrderedDict
from typing import Annotated, Any, Literal, NamedTuple

from PIL import Image
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor

from diagd.pipeline.generator import VideoGenerator
from diagd.web.guard import STRICT
from diagd.web.serve.errors import ApiError, refusing
from diagd.web.serve.scheduler import Job, Updates
from diagd.web.serve.settings import MAX_IMAGES, Settings

MAX_PREVIEWS = 64  # of an image
MAX_PROMPT = 32_000  # characters, as there
KEPT_PICTURES, KEPT_SECONDS = 256, 600.0  # for response_format url
QUALITY = {"png": {}, "jpeg": {"quality": 95, "subsampling": 0}, "webp": {"quality": 90}}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageRequest(Settings):
    """A request for images, in the fields of OpenAI's API; guidance and `Settings` are ours."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: str | None = None  # width x height
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    partial_images: Annotated[int, Field(ge=0, le=MAX_PREVIEWS)] | None = None
    quality: Literal["auto", "standard"] | None = None  # the only one
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None  # none is done
    user: str | None = None  # ignored
    guidance: Annotated[float, Field(ge=0, le=1000)] | None = None


IMAGE_REQUEST = TypeAdapter(ImageRequest)


def makes_images(world: VideoGenerator) -> bool:
    return not world.defaults.context_frames


def size_of(world: VideoGenerator) -> str:
    return "x".join(map(str, reversed(world.frame_size_px)))


def image_jobs(
    world: VideoGenerator, asked: ImageRequest, client: str, max_prompt_tokens: int
) -> list[Job]:
    """Return a job for each image; ApiError if the request does not fit the model."""
    if not makes_images(world):
        message = "this model makes videos: use /v1/videos/continuations"
        raise ApiError(400, message, "model", "wrong_model")
    if asked.size not in (None, "auto", size := size_of(world)):
        raise ApiError(
            400, f"size must be auto or {size}, got {asked.size}", "size", "invalid_value"
        )
    with refusing("prompt"):
        said = world.read_text(asked.prompt) if world.text is not None else None
        actions = world.action_ids(None if said else [asked.prompt], 1, "image")[0]
        prompt = said.prompt[0] if said else actions.new_empty(0)
        longest = max(said.prompt.shape[1], said.unconditional.shape[1]) if said else 0
        if longest > max_prompt_tokens:
            raise ValueError(f"prompt takes {longest} tokens, at most {max_prompt_tokens} are read")
        if said is not None and said.vectors is not None:
            raise ValueError("this model reads texts as vectors, one at a time: it is not served")
    with refusing("guidance"):
        model = world.guided(asked.guidance, [] if said is None else [said])
    strategy, sampling = asked.writing(world)
    seed, updates = asked.seed_or_random(), Updates()
    return [
        Job(
            prompt=prompt,
            context_frames=0,
            actions=actions,
            frame=world.config.frame,
            strategy=strategy,
            sampling=sampling,
            seed=seed + number,
            model=model,
            window=world.window(0),
            num_previews=(asked.partial_images or 0) if asked.stream else 0,
            client=client,
            updates=updates,
            number=number,
        )
        for number in range(asked.n or 1)
    ]


def encode(pixels: Tensor, output_format: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, output_format.upper(), **QUALITY[output_format])
    return file.getvalue()


class Picture(NamedTuple):
    data: bytes
    media_type: str
    until: float  # of the monotonic clock


class Pictures:
    """Keeps the newest pictures for a while, under names that nobody can guess."""

    def __init__(self) -> None:
        self._kept = OrderedDict[str, Picture]()

    def keep(self, data: bytes, output_format: str) -> str:
        name = f"{secrets.token_urlsafe(16)}.{output_format}"
        until = time.monotonic() + KEPT_SECONDS
        self._kept[name] = Picture(data, f"image/{output_format}", until)
        while len(self._kept) > KEPT_PICTURES:
            self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> Picture | None:
        now = time.monotonic()
        while self._kept and next(iter(self._kept.values())).until < now:
            self._kept.popitem(last=False)
        return self._kept.get(name)


def usage_of(jobs: list[Job]) -> dict[str, Any]:
    """Count the tokens of the prompt and of all images."""
    read, written = len(jobs[0].prompt), len(jobs) * jobs[0].frame.grid.num_tokens
    return {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {"text_tokens": read, "image_tokens": 0},
    }


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
