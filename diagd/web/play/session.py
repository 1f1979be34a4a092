"""One player's video: an engine and the choices made frame by frame, without the web.

A session is a function of its start (frames, actions, seed) and one (action, controls) per frame.
Its log of them replays it exactly, and the checksum of each frame's tokens proves it.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.strategy import Diagonal, Strategy, parse_strategy
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator

MAX_TEMPERATURE = 5.0
MAX_SEED = 2**32  # JavaScript holds it exactly
MAX_ACTION_LENGTH = 200
DEFAULT_STRATEGY = Diagonal(1)


@dataclass(frozen=True)
class Controls:
    """What a player may change between two frames.

    Attributes:
        temperature: 0 is greedy. top_p: 1 keeps all tokens.
    """

    strategy: Strategy = DEFAULT_STRATEGY
    temperature: float = GenerationDefaults.temperature
    top_p: float = GenerationDefaults.top_p or 1.0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, MAX_TEMPERATURE), ("top_p", 0.01, 1)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {value!r}")

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Controls":
        """Return the controls of a page or a saved file; one that is left out has its default."""
        strategy = given.get("strategy", cls.strategy.name)
        if not isinstance(strategy, str):
            raise ValueError(f"strategy must be a name, got {strategy!r}")
        return cls(**{**given, "strategy": parse_strategy(strategy)})

    def to_json(self) -> dict[str, Any]:
        """Return them by name."""
        return {**vars(self), "strategy": self.strategy.name}

    def check(self, world: VideoGenerator) -> None:
        """Raise ValueError where a world cannot decode so."""
        world.check(self.strategy, self.sampling(world))

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
class SessionLog:
    """All that a session depends on: it can be saved, and replayed."""

    start: SessionStart
    frames: Sequence[FrameRecord] = ()


class Session:
    """A video that goes on frame by frame from the start frames, which it reads.

    Attributes:
        history: a record of each frame so far.
        num_steps: forward passes of the newest frame.
        written_at: the step that wrote each of its tokens, in raster order; of exact decoding, the
            one that made it final.

    Raises:
        ValueError: more start frames than the model can read.
    """

    def __init__(self, world: VideoGenerator, start: SessionStart) -> None:
        self.world, self.start = world, start
        self.sampling = Controls().sampling(world)
        self.engine = world.start(
            start.frames, context_actions=start.actions, sampling=self.sampling, seed=start.seed
        )
        self.history: list[FrameRecord] = []
        self.num_steps = 0
        self.written_at: tuple[int, ...] = ()

    @property
    def log(self) -> SessionLog:
        """The session so far."""
        return SessionLog(self.start, tuple(self.history))

    def advance(self, action: str, controls: Controls) -> Tensor:
        """Generate the frame that an action leads to; (1, height, width) int64 tokens."""
        engine, strategy = self.engine, controls.strategy
        sampling = controls.sampling(self.world)
        if sampling != self.sampling:
            engine.set_sampling(sampling)
            self.sampling = sampling
        before = engine.num_steps
        (tokens,) = engine.decode(strategy, self.world.action_ids([action], 1, "frame"), 1)
        self.num_steps = engine.num_steps - before
        if strategy.has_schedule:
            grid = TokenGrid(1, self.world.height, self.world.width)
            self.written_at = _steps_of_frame(strategy, grid)
        else:
            final = [s for s, one in enumerate(engine.verified) for _ in range(one.num_accepted)]
            self.written_at = tuple(final[-tokens.numel() :])  # the action's tokens come first
        self.history.append(FrameRecord(action, controls, checksum_of(tokens)))
        return tokens


@lru_cache(maxsize=16)
def _steps_of_frame(strategy: Strategy, grid: TokenGrid) -> tuple[int, ...]:
    schedule = strategy.schedule(grid)
    return tuple(schedule.step_of(0, i, j) for i in range(grid.height) for j in range(grid.width))


def checksum_of(tokens: Tensor) -> int:
    """Return the CRC-32 of a frame's tokens, as little-endian 32-bit integers."""
    return zlib.crc32(tokens.cpu().numpy().astype("<i4").tobytes())


def check_action(action: Any, codec: ActionCodec) -> str:
    """Return an action that the model knows, or raise ValueError."""
    if not isinstance(action, str) or len(action) > MAX_ACTION_LENGTH:
        raise ValueError(f"an action must be a short text, got {str(action)[:40]!r}")
    codec.tokens_of(action)
    return action


FORMAT = "diagd-session-2"
MAX_FRAMES = 20_000  # of a session: forty minutes at the pace of the bundled world
MAX_START_FRAMES = 64
CONTROLS = frozenset(field.name for field in fields(Controls))


def save(log: SessionLog, model: str) -> dict[str, Any]:
    """Return a JSON document of a session."""
    start = log.start
    return {
        "format": FORMAT,
        "model": model,
        "seed": start.seed,
        "start": {
            "shape": list(start.frames.shape),
            "pixels": base64.b64encode(zlib.compress(start.frames.numpy().tobytes())).decode(),
            "actions": list(start.actions),
        },
        "frames": [
            {"action": one.action, **one.controls.to_json(), "checksum": one.checksum}
            for one in log.frames
        ],
    }


def load(document: Any, world: VideoGenerator) -> SessionLog:
    """Return the session of a document that `save` made; anybody may have written it.

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
    count, size_px = shape[0], world.frame_size_px
    if not 1 <= count <= MAX_START_FRAMES:
        raise ValueError(f"a saved dream starts with 1 to {MAX_START_FRAMES} frames, got {count}")
    if shape[1:] != [*size_px, 3]:
        raise ValueError(
            f"the saved dream has frames of {shape[1]}x{shape[2]} pixels, "
            f"this model {size_px[0]}x{size_px[1]}"
        )
    if not isinstance(actions, list) or len(actions) != count - 1:
        raise ValueError(f"the saved dream's start needs {count - 1} actions")
    assert world.vocabulary is not None
    frames = _inflate(start.get("pixels"), shape)
    between = tuple(check_action(action, world.vocabulary) for action in actions)
    records = tuple(_frame_record(row, world, world.vocabulary) for row in rows)
    return SessionLog(SessionStart(frames, between, document.get("seed", -1)), records)


def _frame_record(row: Any, world: VideoGenerator, codec: ActionCodec) -> FrameRecord:
    named = {"action", "checksum"}
    if not isinstance(row, dict) or not named <= row.keys() <= named | CONTROLS:
        raise ValueError(
            "a frame of a saved dream must have an action, controls and a checksum, "
            f"got {str(row)[:60]}"
        )
    if type(row["checksum"]) is not int:
        raise ValueError(f"a checksum must be a whole number, got {str(row['checksum'])[:40]}")
    controls = Controls.from_json({name: row[name] for name in row.keys() - named})
    controls.check(world)
    return FrameRecord(check_action(row["action"], codec), controls, row["checksum"])


def _inflate(text: Any, shape: list[int]) -> Tensor:
    """Undo base64 and deflate; never makes more bytes than the shape has."""
    height_px, width_px = shape[1:3]
    size = shape[0] * height_px * width_px * 3
    try:
        pixels = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size)
    except (zlib.error, binascii.Error, TypeError, ValueError):
        pixels = b""
    if len(pixels) != size:
        raise ValueError("the saved dream's start frames are damaged")
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
