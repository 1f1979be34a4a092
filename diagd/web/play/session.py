"""One player's video: an engine and the choices made frame by frame, whose log replays it."""

import base64
import contextlib
import dataclasses
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor

from diagd.decoding.engine import Batch
from diagd.decoding.generate_tokens import begin_frames
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid, steps_of_frame
from diagd.decoding.strategies.table import Diagonal, Strategy, as_strategy
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene
from diagd.web.guard import STRICT, read_json

MAX_SEED = 2**32  # JavaScript holds it exactly
MAX_FRAMES = 20_000  # of a session: forty minutes at the pace of the bundled world
MAX_START_FRAMES = 64
FORMAT = "diagd-dream-2"  # of saved dreams: dream.js has it, too

Action = Annotated[str, Field(max_length=800)]
StrategyByName = Annotated[Strategy, PlainValidator(as_strategy), PlainSerializer(str)]  # in JSON


@dataclass(frozen=True, config=STRICT)
class Controls:
    """Settings that may change between two frames; one left out in JSON has its default."""

    strategy: StrategyByName = Diagonal(1)
    temperature: Annotated[float, Field(ge=0, le=5)] = GenerationDefaults.temperature
    top_p: Annotated[float, Field(ge=0.01, le=1)] = GenerationDefaults.top_p or 1.0

    def sampling(self, world: VideoGenerator) -> SamplingOptions:
        rules = (world.defaults.top_k, self.top_p) if self.temperature else (None, None)
        return world.sampling(SamplingOptions(self.temperature, *rules))


@dataclass(frozen=True, config=STRICT)
class FrameRecord:
    """One generated frame: what was chosen for it, and the CRC-32 of its tokens if it is known."""

    action: Action
    controls: Controls
    checksum: int | None = None
    engine: Annotated[str | None, Field(max_length=20)] = None  # webgpu: a browser's, which rounds


@dataclasses.dataclass(frozen=True, eq=False)
class SessionLog:
    """Everything that a session depends on, to save and to replay it."""

    frames: Tensor  # (m, H_px, W_px, 3) uint8, that it begins with
    actions: tuple[str, ...]  # the m - 1 between them
    seed: int  # of its draws, in [0, MAX_SEED)
    history: tuple[FrameRecord, ...] = ()  # of the frames that it generated
    name: str | None = None  # of the scene that it begins with; None: a picture of one's own

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"seed must be in [0, {MAX_SEED}), got {self.seed}")


class Session:
    """A video that goes on frame by frame; ValueError if its start is too long for the model."""

    def __init__(
        self, world: VideoGenerator, start: SessionLog, batch: Batch | None = None
    ) -> None:
        self.world, self.start = world, start
        tokens, grids = world.prompt(start.frames, start.actions)
        max_slots, keep_frames = world.window(len(grids))
        own = batch or memory_of(world, 1, max_slots)
        given = {"max_slots": max_slots, "keep_frames": keep_frames}
        self.stream = own.admit(world.config.frame, world.sampling(), start.seed, **given)
        try:
            self.stream.read(tokens[0], len(grids))
        except ValueError:
            self.stream.close()  # at once: who holds the error holds the stream
            raise
        while batch is None and self.stream.num_unread:  # else the steps of all read it
            own.step()
        self._before, self._chosen = 0, ("", Controls())
        self.history: list[FrameRecord] = []
        self.num_steps = 0  # of the newest frame
        # the step that wrote each of its tokens, in raster order; of exact decoding, made it final
        self.written_at: tuple[int, ...] = ()

    @property
    def log(self) -> SessionLog:
        return dataclasses.replace(self.start, history=tuple(self.history))

    @property
    def expected(self) -> FrameRecord | None:
        """The next frame of the log that it began with, as long as it replays that."""
        length, known = len(self.history), self.start.history
        return known[length] if length < len(known) else None

    def begin(self, action: str, controls: Controls) -> None:
        """Have the batch's steps write the frame that an action leads to.

        Action and controls fit the world: whoever let them in has checked that.
        """
        stream = self.stream
        if (sampling := controls.sampling(self.world)) != stream.sampling:
            stream.set_sampling(sampling)
        self._before, self._chosen = stream.num_steps, (action, controls)
        begin_frames(stream, controls.strategy, self.world.ids_of([action])[0])

    @property
    def is_whole(self) -> bool:
        """Whether the frame that was begun is written."""
        return self.stream.num_taken < self.stream.num_whole

    def advance(self, action: str, controls: Controls) -> Tensor:
        """Generate the frame that an action leads to; (1, height, width) int64 tokens."""
        self.begin(action, controls)
        while not self.is_whole:
            self.stream.batch.step()
        return self.finish()

    def finish(self) -> Tensor:
        """Return the tokens of the frame that is whole, (1, height, width) int64."""
        (action, controls), stream = self._chosen, self.stream
        tokens, strategy = stream.take_frame()[None], controls.strategy
        stream.stop()
        self.num_steps = stream.num_steps - self._before
        if strategy.has_schedule:
            grid = TokenGrid(1, self.world.height, self.world.width)
            self.written_at = steps_of_frame(strategy.schedule(grid))
        else:
            verified = enumerate(stream.verified)
            final = [step for step, one in verified for _ in range(one.num_accepted)]
            self.written_at = tuple(final[-tokens.numel() :])  # the action's tokens come first
        self.history.append(FrameRecord(action, controls, checksum_of(tokens)))
        return tokens


def memory_of(world: VideoGenerator, num_sessions: int, max_slots: int | None = None) -> Batch:
    """Allocate the memory of sessions that share their steps, by default for any start."""
    held = world.config.max_positions if max_slots is None else max_slots
    return Batch(world.guided(None), num_sessions, held + world.config.num_action_tokens + 1)


def checksum_of(tokens: Tensor) -> int:
    return zlib.crc32(tokens.cpu().numpy().astype("<i4").tobytes())


def _read_format(name: str) -> str:
    if name != FORMAT:
        raise ValueError(f"expected {FORMAT!r}, got {name[:40]!r} (of another version of diagd)")
    return name


@dataclass(frozen=True, config=STRICT)
class SavedStart:
    """The start frames: their shape, and base64 of their deflated bytes."""

    shape: Annotated[list[int], Field(min_length=4, max_length=4)]
    pixels: str
    actions: list[Action]


@dataclass(frozen=True, config=STRICT)
class SavedDream:
    """A dream as servers and browsers (dream.js) save it, of a scene or of frames of its own."""

    format: Annotated[str, AfterValidator(_read_format)]
    model: str
    seed: int
    frames: Annotated[tuple[FrameRecord, ...], Field(max_length=MAX_FRAMES)]
    start: SavedStart | None = None  # of a picture of one's own; else
    scene: str | None = None  # one of the world's, by its name


_SAVED = TypeAdapter(SavedDream)


def save_log(log: SessionLog, model: str) -> bytes:
    start = None
    if log.name is None:
        pixels = base64.b64encode(zlib.compress(log.frames.numpy().tobytes())).decode()
        start = SavedStart(list(log.frames.shape), pixels, list(log.actions))
    saved = SavedDream(FORMAT, model, log.seed, log.history, start, log.name)
    return _SAVED.dump_json(saved, exclude_none=True)


def load_log(
    data: bytes | str, world: VideoGenerator, scenes: Sequence[StartScene] = ()
) -> SessionLog:
    """Read what `save_log` wrote, or anybody; ValueError for what is bad or does not fit."""
    saved = read_json(_SAVED, data, "saved dream")
    assert world.vocabulary is not None
    for action in {record.action for record in saved.frames}:
        world.vocabulary.tokens_of(action)
    for controls in {record.controls for record in saved.frames}:
        world.check(controls.strategy, controls.sampling(world))
    if saved.start is not None:
        frames, actions = _read_start(saved.start, world)
        return SessionLog(frames, actions, saved.seed, saved.frames)
    if saved.model != name_of(world):
        raise ValueError(f"a dream of the world {saved.model[:40]!r}, not of {name_of(world)!r}")
    scene = next((one for one in scenes if one.name == saved.scene), None)
    if scene is None:
        raise ValueError(f"the dream begins with a scene that is not here: {saved.scene!r:.40}")
    return SessionLog(scene.frames, scene.actions, saved.seed, saved.frames, scene.name)


def name_of(world: VideoGenerator) -> str:
    return Path(world.source.name_or_path).name if world.source else ""


def _read_start(start: SavedStart, world: VideoGenerator) -> tuple[Tensor, tuple[str, ...]]:
    (count, *shown), size_px = start.shape, world.frame_size_px
    if not 1 <= count <= MAX_START_FRAMES:
        raise ValueError(f"a saved dream starts with 1 to {MAX_START_FRAMES} frames, got {count}")
    if shown != [*size_px, 3]:
        raise ValueError(
            f"the saved dream has frames of {shown[0]}x{shown[1]} pixels, "
            f"this model {size_px[0]}x{size_px[1]}"
        )
    if len(start.actions) != count - 1:
        raise ValueError(f"the saved dream's start needs {count - 1} actions")
    assert world.vocabulary is not None
    for action in start.actions:
        world.vocabulary.tokens_of(action)
    return _inflate(start.pixels, start.shape), tuple(start.actions)


def _inflate(text: str, shape: list[int]) -> Tensor:
    size, pixels = math.prod(shape), b""  # no more is made of what would inflate without end
    with contextlib.suppress(zlib.error, ValueError):
        pixels = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size)
    if len(pixels) != size:
        raise ValueError("the saved dream's start frames are damaged")
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
