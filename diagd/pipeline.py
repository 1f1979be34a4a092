"""Pixels in, pixels out: a world model and its tokenizer, dreaming on from a few frames.

import diagd
world = diagd.VideoGenerator.from_pretrained("doom")
video = world.generate(frames, ["forward"] * 16, num_frames=16, row_lag=1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from diagd.backends import Backend, prepare
from diagd.data.actions import ActionCodec
from diagd.data.tokenizers import VideoTokenizer
from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.exact import ExactOptions
from diagd.decoding.generate import GenerationStats, generate_tokens, make_engine
from diagd.decoding.plan import RowStart
from diagd.decoding.runner import CausalModel, RunnerName
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.pretrained import load_parts


@dataclass(frozen=True)
class GeneratedVideo:
    """What a world model dreamt.

    Attributes:
        frames: (T, H_px, W_px, 3) uint8 RGB, the generated frames only.
        tokens: (T, height, width) int64.
        stats: what decoding took; tokenizing is not in it.
    """

    frames: Tensor
    tokens: Tensor
    stats: GenerationStats


class VideoGenerator:
    """A world model with its tokenizer and its actions.

    Args:
        model: predicts tokens.
        tokenizer: turns frames into a grid of tokens and back.
        height, width: tokens of a frame.
        vocabulary: what actions there are; None for a model without actions.
        runner: how steps are executed.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: VideoTokenizer,
        height: int,
        width: int,
        vocabulary: ActionCodec | None,
        runner: RunnerName = "eager",
    ) -> None:
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, vocabulary
        self.height, self.width = height, width
        self.runner: RunnerName = runner

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path = "doom",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: Backend = "auto",
        int8: bool = False,
    ) -> "VideoGenerator":
        """Load a checkpoint folder with a tokenizer, or the bundled model `doom`.

        Args:
            backend, int8: what runs the model, and whether its weights are rounded to 8 bits (see
                `diagd.backends.prepare`).

        Raises:
            FileNotFoundError, ValueError: something is missing or damaged (named).
        """
        parts = load_parts(name_or_path, device, dtype)
        model, runner, _ = prepare(parts.model, backend, int8)
        config = parts.model.config
        size = config.grid_height, config.grid_width
        return cls(model, parts.tokenizer, *size, parts.vocabulary, runner)

    @property
    def frame_size_px(self) -> tuple[int, int]:
        """Height and width of a frame in pixels."""
        return self.height * self.tokenizer.compression, self.width * self.tokenizer.compression

    def generate(
        self,
        frames: Tensor,
        actions: Sequence[str] | None = None,
        num_frames: int = 16,
        row_lag: int = 1,
        frame_lag: int | None = None,
        *,
        context_actions: Sequence[str] | None = None,
        raster: bool = False,
        row_start: RowStart = "temporal",
        sampling: SamplingOptions | None = None,
        seed: int = 0,
        exact: bool | ExactOptions = False,
    ) -> GeneratedVideo:
        """Dream on from context frames.

        Args:
            frames: (m, H_px, W_px, 3) uint8 RGB, the context, of `frame_size_px`.
            actions: one action name for each generated frame, that leads to it.
            frame_lag: steps between frames; None finishes a frame before the next begins.
            context_actions: the m - 1 actions between the context frames.
            raster: next-token prediction instead of diagonals.
            exact: raster's tokens in fewer passes (see `ExactEngine`).
            sampling: `DEFAULT_SAMPLING` by default; visual ids only in any case.

        Raises:
            ValueError: frames or actions that do not fit.
        """
        schedule = self.schedule(num_frames, row_lag, frame_lag, raster)
        action_ids = self.action_ids(actions, num_frames, "generated frame")
        prompt = self._prompt(frames, context_actions)
        out = generate_tokens(
            self.model,
            prompt,
            schedule,
            action_ids,
            context_frames=len(frames),
            row_start=row_start,
            sampling=self._visual(sampling),
            seed=seed,
            runner=self.runner,
            exact=exact,
        )
        tokens = out.tokens[0]
        return GeneratedVideo(self.tokenizer.decode(tokens).cpu(), tokens, out.stats)

    def stream(
        self,
        frames: Tensor,
        actions: Iterator[str],
        row_lag: int = 1,
        *,
        context_actions: Sequence[str] | None = None,
        row_start: RowStart = "temporal",
        sampling: SamplingOptions | None = None,
        seed: int = 0,
        exact: bool | ExactOptions = False,
    ) -> Iterator[Tensor]:
        """Dream a frame for every action, as long as actions come; each is (H_px, W_px, 3) uint8.

        Old frames leave the context when it is full (see `DiagonalEngine`).
        """
        engine = self.start(
            frames,
            context_actions=context_actions,
            row_start=row_start,
            sampling=sampling,
            seed=seed,
            exact=exact,
        )
        schedule = self.schedule(1, row_lag)
        for action in actions:
            for tokens in engine.decode(schedule, self.action_ids([action], 1, "generated frame")):
                yield self.tokenizer.decode(tokens)[0].cpu()

    def start(
        self,
        frames: Tensor,
        *,
        context_actions: Sequence[str] | None = None,
        row_start: RowStart = "temporal",
        sampling: SamplingOptions | None = None,
        seed: int = 0,
        exact: bool | ExactOptions = False,
    ) -> DiagonalEngine:
        """Return an engine that has read the context frames, to be driven frame by frame.

        Each frame may have a schedule of its own: `engine.decode(world.schedule(1, row_lag),
        world.action_ids([action], 1, "frame"))` yields its tokens.
        """
        engine = make_engine(
            exact,
            self.model,
            self.height,
            self.width,
            num_action_tokens=self.vocabulary.num_tokens if self.vocabulary else 0,
            row_start=row_start,
            sampling=self._visual(sampling),
            seed=seed,
            runner=self.runner,
        )
        engine.prefill(self._prompt(frames, context_actions), len(frames))
        return engine

    def schedule(
        self, num_frames: int, row_lag: int = 1, frame_lag: int | None = None, raster: bool = False
    ) -> DiagonalSchedule:
        """Return the schedule of so many frames; without frame_lag they do not overlap."""
        grid = TokenGrid(num_frames, self.height, self.width)
        if raster:
            return DiagonalSchedule.raster(grid)
        if frame_lag is None:
            return DiagonalSchedule.spatial(grid, row_lag)
        return DiagonalSchedule(grid, row_lag, frame_lag)

    def _prompt(self, frames: Tensor, context_actions: Sequence[str] | None) -> Tensor:
        """Return (1, P) tokens of the context frames with the actions between them."""
        height_px, width_px = self.frame_size_px
        if frames.ndim != 4 or frames.shape[1:] != (height_px, width_px, 3):
            raise ValueError(
                f"frames must be (T, {height_px}, {width_px}, 3) uint8, got {tuple(frames.shape)}"
            )
        visual = self.tokenizer.encode(frames.to(self.model.device)).flatten(1)
        ids = self.action_ids(context_actions, len(frames) - 1, "context frame after the first")
        if ids is None:
            return visual.flatten()[None]
        between = torch.cat([ids.new_zeros(1, ids.shape[-1]), ids[0]])  # the first is cut off
        return torch.cat([between, visual], dim=1).flatten()[None, ids.shape[-1] :]

    def action_ids(self, actions: Sequence[str] | None, count: int, what: str) -> Tensor | None:
        """Return (1, count, num_tokens) ids, or None for a model without actions.

        Raises:
            ValueError: not `count` actions, or one that the model does not know.
        """
        if self.vocabulary is None:
            if actions:
                raise ValueError("this model takes no actions")
            return None
        given = len(actions) if actions is not None else 0
        if given != count:
            raise ValueError(f"expected {count} actions, one for each {what}, got {given}")
        ids = [self.vocabulary.tokens_of(action) for action in actions or ()]
        local = torch.tensor(ids, dtype=torch.int64, device=self.model.device)
        return local.view(1, count, self.vocabulary.num_tokens) + self.tokenizer.codebook_size

    def _visual(self, sampling: SamplingOptions | None) -> SamplingOptions:
        sampling = sampling or DEFAULT_SAMPLING
        if sampling.valid_range is not None:
            return sampling
        return replace(sampling, valid_range=(0, self.tokenizer.codebook_size))


DEFAULT_SAMPLING = SamplingOptions(temperature=1.0, top_p=0.9)
