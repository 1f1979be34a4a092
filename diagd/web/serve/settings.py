"""What all requests may say: the model, how it writes, and how the answer comes."""

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

MAX_IMAGES = 10  # of a request; each has a seed of its own


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of a request; null, here and below, stands for what is not given."""

    model: str | None = None
    stream: bool | None = None  # answer by server-sent events
    strategy: Annotated[str, Field(max_length=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63 - MAX_IMAGES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def writing(self, world: VideoGenerator) -> tuple[Strategy, SamplingOptions]:
        """Return how a model writes, as its makers have it where nothing is said."""
        with refusing("strategy"):
            strategy = DecodingFlags(strategy=self.strategy).decoding(world.defaults, world.height)
            world.check(strategy)
        flags = SamplingFlags(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        with refusing(None):
            return strategy, world.sampling(flags.sampling(world.defaults))

    def seed_or_random(self) -> int:
        return secrets.randbelow(2**31) if self.seed is None else self.seed
