"""Settings that all requests share: model, decoding, sampling."""

import secrets
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Strategy
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.options import DecodingFlags, SamplingFlags
from diagd.web.guard import STRICT
from diagd.web.serve.errors import refusing

MAX_IMAGES = 10  # per request; image i has seed + i


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of a request; null means not given."""

    model: str | None = None
    stream: bool | None = None  # respond with server-sent events
    strategy: Annotated[str, Field(max_length=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63 - MAX_IMAGES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def writing(self, world: VideoGenerator) -> tuple[Strategy, SamplingOptions]:
        """Return strategy and sampling; the model's defaults where nothing is given."""
        with refusing("strategy"):
            strategy = DecodingFlags(strategy=self.strategy).decoding(world.defaults, world.height)
            world.check(strategy)
        flags = SamplingFlags(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        with refusing(None):
            return strategy, world.sampling(flags.sampling(world.defaults))

    def seed_or_random(self) -> int:
        return secrets.randbelow(2**31) if self.seed is None else self.seed
