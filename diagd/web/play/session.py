"""One player's dream: an engine, the choices made frame by frame, and nothing of the web.

A session is a function of its start (frames, actions, seed) and of one (action, controls) a frame,
so that list replays it exactly; the checksum of each frame's tokens proves it.
"""

import zlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from diagd.decoding.exact import ExactEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator

Order = int | Literal["raster", "exact"]
MAX_TEMPERATURE = 5.0
MAX_SEED = 2**32  # JavaScript holds it exactly


@dataclass(frozen=True)
class Controls:
    """What a player may change between two frames.

    Attributes:
        order: row_lag (the paper's k), `raster` for one token a step, or `exact` for the same
            tokens in fewer passes (see `ExactEngine`).
        temperature: 0 is greedy. top_p: 1 keeps all tokens.
    """

    order: Order = 1
    temperature: float = GenerationDefaults.temperature
    top_p: float = GenerationDefaults.top_p or 1.0

    def __post_init__(self) -> None:
        if self.order not in ("raster", "exact") and (
            type(self.order) is not int or self.order < 1
        ):
            raise ValueError(f"order must be raster, exact or a row_lag from 1, got {self.order!r}")
        for name, low, high in (("temperature", 0, MAX_TEMPERATURE), ("top_p", 0.01, 1)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {value!r}")

    def schedule(self, world: VideoGenerator) -> DiagonalSchedule:
        """Return the schedule of one frame, or raise ValueError for a lag wider than it."""
        if isinstance(self.order, int):
            return world.schedule(1, self.order)
        return world.schedule(1, raster=True)

    def sampling(self, world: VideoGenerator) -> SamplingOptions:
        """Return how tokens are drawn: visual ids only, and greedily at temperature 0."""
        if self.temperature == 0:
            return world.sampling(SamplingOptions())
        return world.sampling(SamplingOptions(self.temperature, top_p=self.top_p))


@dataclass(frozen=True, eq=False)
class Start:
    """Where a dream begins.

    Attributes:
        frames: (m, H_px, W_px, 3) uint8. actions: the m - 1 between them.
        seed: in [0, MAX_SEED).
    """

    frames: Tensor
    actions: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"seed must be a whole number in [0, {MAX_SEED}), got {self.seed!r}")


class Moment(NamedTuple):
    """One dreamt frame: what was chosen for it, and the CRC-32 of its tokens."""

    action: str
    controls: Controls
    checksum: int


class Session:
    """A dream that goes on frame by frame.

    Attributes:
        history: the moments so far; with `start` they are the whole dream.
        num_steps: forward passes of the newest frame.
        runs: tokens that each of them made final, where the order was `exact`; else empty.
    """

    def __init__(self, world: VideoGenerator, start: Start) -> None:
        """Read the start frames.

        Raises:
            ValueError: frames or actions that do not fit the model.
        """
        self.world, self.start = world, start
        self.sampling = Controls().sampling(world)
        engine = world.start(
            start.frames,
            context_actions=start.actions,
            sampling=self.sampling,
            seed=start.seed,
            exact=True,
        )
        assert isinstance(engine, ExactEngine)
        self.engine = engine
        self.history: list[Moment] = []
        self.num_steps = 0
        self.runs: list[int] = []

    def advance(self, action: str, controls: Controls) -> Tensor:
        """Dream the frame that an action leads to; (1, height, width) int64 tokens.

        Raises:
            ValueError: an unknown action, or a row_lag wider than a frame.
        """
        ids = self.world.action_ids([action], 1, "frame")
        schedule = controls.schedule(self.world)
        sampling = controls.sampling(self.world)
        if sampling != self.sampling:
            self.engine.set_sampling(sampling)
            self.sampling = sampling
        self.engine.follows_schedules = controls.order != "exact"
        self.engine.passes.clear()
        before = self.engine.num_steps
        (tokens,) = self.engine.decode(schedule, ids)
        self.num_steps = self.engine.num_steps - before
        self.runs = [one.num_accepted for one in self.engine.passes]
        self.history.append(Moment(action, controls, checksum_of(tokens)))
        return tokens

    @property
    def max_frames(self) -> int:
        """Frames that the model's context holds."""
        frame = self.engine.frame
        return (self.engine.max_slots + frame.num_action_tokens) // frame.slots_per_frame


def checksum_of(tokens: Tensor) -> int:
    """Return the CRC-32 of a frame's tokens, as little-endian 32-bit integers."""
    return zlib.crc32(tokens.cpu().numpy().astype("<i4").tobytes())
