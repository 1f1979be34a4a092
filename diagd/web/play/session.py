"""One player's video: an engine, the choices made frame by frame, and nothing of the web.

A session is a function of its start (frames, actions, seed) and of one (action, controls) a frame,
so that list replays it exactly; the checksum of each frame's tokens proves it.
"""

import base64
import binascii
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.strategies.strategy import parse_strategy
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator

MAX_TEMPERATURE = 5.0
MAX_SEED = 2**32  # JavaScript holds it exactly


@dataclass(frozen=True)
class Controls:
    """What a player may change between two frames.

    Attributes:
        strategy: how the frame is decoded, by name.
        temperature: 0 is greedy. top_p: 1 keeps all tokens.
    """

    strategy: str = "k=1"
    temperature: float = GenerationDefaults.temperature
    top_p: float = GenerationDefaults.top_p or 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str):
            raise ValueError(f"strategy must be a name, got {self.strategy!r}")
        parse_strategy(self.strategy)
        for name, low, high in (("temperature", 0, MAX_TEMPERATURE), ("top_p", 0.01, 1)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {value!r}")

    def check(self, world: VideoGenerator) -> None:
        """Raise ValueError where a world cannot decode so."""
        world.check(parse_strategy(self.strategy), self.sampling(world))

    def sampling(self, world: VideoGenerator) -> SamplingOptions:
        """Return how tokens are drawn: visual ids only, and greedily at temperature 0."""
        if self.temperature == 0:
            return world.sampling(SamplingOptions())
        return world.sampling(SamplingOptions(self.temperature, top_p=self.top_p))


@dataclass(frozen=True, eq=False)
class SessionStart:
    """Where a session begins.

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


class FrameRecord(NamedTuple):
    """One generated frame: what was chosen for it, and the CRC-32 of its tokens."""

    action: str
    controls: Controls
    checksum: int


@dataclass(frozen=True, eq=False)
class PendingStart:
    """A session yet to begin; the frames of a saved one are generated again first."""

    start: SessionStart
    replay: tuple[FrameRecord, ...] = ()


@dataclass(frozen=True, eq=False)
class PastSession:
    """What of a session outlives its memory: enough to save it."""

    start: SessionStart
    history: list[FrameRecord]


class Session:
    """A video that goes on frame by frame.

    Attributes:
        history: a record of each frame so far; with `start` they are the whole session.
        num_steps: forward passes of the newest frame.
        written_at: the step that wrote each of its tokens, in raster order; of exact decoding, the
            one that made it final.
    """

    def __init__(self, world: VideoGenerator, start: SessionStart) -> None:
        """Read the start frames.

        Raises:
            ValueError: frames or actions that do not fit the model.
        """
        self.world, self.start = world, start
        self.sampling = Controls().sampling(world)
        self.engine = world.start(
            start.frames,
            context_actions=start.actions,
            sampling=self.sampling,
            seed=start.seed,
        )
        self.history: list[FrameRecord] = []
        self.num_steps = 0
        self.written_at: tuple[int, ...] = ()

    def advance(self, action: str, controls: Controls) -> Tensor:
        """Generate the frame that an action leads to; (1, height, width) int64 tokens.

        Raises:
            ValueError: an unknown action, or a strategy that does not fit.
        """
        ids = self.world.action_ids([action], 1, "frame")
        sampling = controls.sampling(self.world)
        if sampling != self.sampling:
            self.engine.set_sampling(sampling)
            self.sampling = sampling
        engine, strategy = self.engine, parse_strategy(controls.strategy)
        before = engine.num_steps
        (tokens,) = engine.decode(strategy, ids, 1)
        self.num_steps = engine.num_steps - before
        if strategy.has_schedule:
            grid = TokenGrid(1, self.world.height, self.world.width)
            self.written_at = steps_of_frame(strategy.schedule(grid))
        else:
            final = [s for s, one in enumerate(engine.verified) for _ in range(one.num_accepted)]
            self.written_at = tuple(final[-tokens.numel() :])  # the action's tokens come first
        self.history.append(FrameRecord(action, controls, checksum_of(tokens)))
        return tokens


@lru_cache(maxsize=16)
def steps_of_frame(schedule: DiagonalSchedule) -> tuple[int, ...]:
    """Return the step that writes each token of the first frame, in raster order."""
    grid = schedule.grid
    return tuple(schedule.step_of(0, i, j) for i in range(grid.height) for j in range(grid.width))


def check_action(action: Any, world: VideoGenerator) -> str:
    """Return an action that the model knows, or raise ValueError."""
    if not isinstance(action, str) or len(action) > 200:
        raise ValueError(f"an action must be a short text, got {str(action)[:40]!r}")
    if world.vocabulary is None:
        raise ValueError("this model takes no actions")
    world.vocabulary.tokens_of(action)
    return action


def checksum_of(tokens: Tensor) -> int:
    """Return the CRC-32 of a frame's tokens, as little-endian 32-bit integers."""
    return zlib.crc32(tokens.cpu().numpy().astype("<i4").tobytes())


FORMAT = "diagd-session-1"
MAX_FRAMES = 20_000  # of a session: forty minutes at the pace of the bundled world
MAX_START_FRAMES = 64


def save(session: Session | PastSession, model: str) -> dict[str, Any]:
    """Write a session down."""
    frames, records = session.start.frames, list(session.history)
    return {
        "format": FORMAT,
        "model": model,
        "seed": session.start.seed,
        "start": {
            "shape": list(frames.shape),
            "pixels": base64.b64encode(zlib.compress(frames.numpy().tobytes())).decode(),
            "actions": list(session.start.actions),
        },
        "frames": [[r.action, *vars(r.controls).values(), r.checksum] for r in records],
    }


def load(document: Any, world: VideoGenerator) -> PendingStart:
    """Read what `save` wrote.

    Raises:
        ValueError: no such document, or one of a model with other frames or actions.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"this is no saved dream (expected a JSON file with format {FORMAT})")
    start, rows = document.get("start"), document.get("frames")
    if not isinstance(start, dict) or not isinstance(rows, list):
        raise ValueError("the saved dream has no start or no frames")
    if len(rows) > MAX_FRAMES:
        raise ValueError(f"a dream has at most {MAX_FRAMES} frames, this one has {len(rows)}")
    shape, actions = start.get("shape"), start.get("actions")
    if not (isinstance(shape, list) and len(shape) == 4 and all(type(n) is int for n in shape)):
        raise ValueError("the saved dream's start has no shape")
    height_px, width_px = world.frame_size_px
    if not 1 <= shape[0] <= MAX_START_FRAMES:
        raise ValueError(
            f"a saved dream starts with 1 to {MAX_START_FRAMES} frames, got {shape[0]}"
        )
    if shape[1:] != [height_px, width_px, 3]:
        given = "x".join(map(str, shape[1:3]))
        raise ValueError(
            f"the saved dream has frames of {given} pixels, this model {height_px}x{width_px}"
        )
    if not isinstance(actions, list) or len(actions) != shape[0] - 1:
        raise ValueError(f"the saved dream's start needs {shape[0] - 1} actions")
    pixels = _inflate(start.get("pixels"), shape[0] * height_px * width_px * 3)
    frames = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
    for action in actions:
        check_action(action, world)
    replay = tuple(_frame_record(row, world) for row in rows)
    return PendingStart(SessionStart(frames, tuple(actions), document.get("seed", -1)), replay)


def _frame_record(row: Any, world: VideoGenerator) -> FrameRecord:
    if not isinstance(row, list) or len(row) != 5 or type(row[4]) is not int:
        raise ValueError(f"a frame of a saved dream must have five entries, got {str(row)[:60]}")
    action, strategy, temperature, top_p, checksum = row
    if type(strategy) is int:  # a row_lag, as it was written before strategies had names
        strategy = f"k={strategy}"
    controls = Controls(strategy, temperature, top_p)
    controls.check(world)
    return FrameRecord(check_action(action, world), controls, checksum)


def _inflate(text: Any, size: int) -> bytes:
    """Undo base64 and deflate; never makes more than `size` bytes."""
    try:
        inflater = zlib.decompressobj()
        pixels = inflater.decompress(base64.b64decode(text, validate=True), size)
    except (zlib.error, binascii.Error, TypeError, ValueError):
        raise ValueError("the saved dream's start frames are damaged") from None
    if len(pixels) != size:
        raise ValueError("the saved dream's start frames are damaged")
    return pixels
