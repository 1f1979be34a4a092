"""Pixels in, pixels out: a world model and its tokenizer, going on from a few frames.

import diagd
world = diagd.VideoGenerator.from_pretrained("doom")
video = world.generate(frames, ["forward"] * 16, num_frames=16, strategy="k=1")
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.backends.prepare import Backend, prepare
from diagd.data.actions import ActionCodec
from diagd.decoding.engine import DecodingEngine
from diagd.decoding.generate_tokens import GenerationStats, generate_tokens
from diagd.decoding.runner import CausalModel, RunnerName
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.short_forms import strategy_of
from diagd.decoding.strategies.strategy import Conditions, Strategy
from diagd.families.defaults import GenerationDefaults, visual_ranges
from diagd.models.config import ModelConfig
from diagd.pipeline.pretrained import load_parts, prefix_ids
from diagd.pipeline.prompt_tokens import action_ids, check_clip, check_size, prompt_tokens
from diagd.tokenizers.vq import VideoTokenizer


@dataclass(frozen=True)
class GeneratedVideo:
    """What a world model generated.

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
        runner: how steps are executed.
        config: what the model is; the grid of a frame above all.
        tokenizer: turns frames into grids of tokens and back.
        vocabulary: what actions there are; None for a model without actions.
        defaults: what is done where nothing else is asked for.
        dtype, backend: by which names the model's numbers, and what runs it, are shown.
    """

    def __init__(
        self,
        model: CausalModel,
        runner: RunnerName,
        config: ModelConfig,
        tokenizer: VideoTokenizer,
        vocabulary: ActionCodec | None,
        defaults: GenerationDefaults,
        dtype: str = "float32",
        backend: str = "eager",
    ) -> None:
        self.dtype, self.backend = dtype, backend
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, vocabulary
        self.runner: RunnerName = runner
        self.config, self.defaults = config, defaults
        self.height, self.width = config.grid_height, config.grid_width
        self.valid_range = visual_ranges(defaults, config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path = "doom",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: Backend = "auto",
        int8: bool = False,
        config: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> "VideoGenerator":
        """Load a checkpoint with a tokenizer, ours or a released one, or the bundled model `doom`.

        Args:
            backend, int8: what runs the model, and whether its weights are rounded to 8 bits (see
                `diagd.backends.prepare.prepare`).
            config, tokenizer: a config file and a tokenizer folder, where they are not with the
                checkpoint (see `diagd.pipeline.pretrained.load_parts`).

        Raises:
            FileNotFoundError, ValueError: something is missing or damaged (named).
        """
        parts = load_parts(name_or_path, device, dtype, config, tokenizer)
        shape = parts.model.config
        numbers = "int8" if int8 else str(parts.model.dtype).removeprefix("torch.")
        model, runner, chosen = prepare(parts.model, backend, int8)
        return cls(
            model,
            runner,
            shape,
            parts.tokenizer,
            parts.vocabulary,
            parts.defaults,
            numbers,
            chosen,
        )

    @property
    def frame_size_px(self) -> tuple[int, int]:
        """Height and width of a frame in pixels."""
        return self.tokenizer.frame_size_px(self.height, self.width)

    def generate(
        self,
        frames: Tensor,
        actions: Sequence[str] | None = None,
        num_frames: int = 16,
        row_lag: int | None = None,
        frame_lag: int | None = None,
        *,
        strategy: Strategy | str | None = None,
        raster: bool = False,
        exact: bool = False,
        context_actions: Sequence[str] | None = None,
        sampling: SamplingOptions | None = None,
        seed: int = 0,
        text: Tensor | None = None,
    ) -> GeneratedVideo:
        """Go on from context frames.

        Args:
            frames: (m, H_px, W_px, 3) uint8 RGB, the context, of `frame_size_px`.
            actions: one action name for each generated frame, that leads to it.
            row_lag, frame_lag, raster, exact: short for the strategies `k=...,d=...`, `raster` and
                `exact`.
            strategy: how to decode, by name (see `diagd.decoding.strategies.table`) or as a value;
                `k=1` by default.
            context_actions: the m - 1 actions between the context frames.
            sampling: the model's own by default; visual ids only in any case.
            text: (1, M, size) states of a text encoder, for models that read a text.

        Raises:
            ValueError: frames, actions or a strategy that do not fit.
        """
        num_grids = self.grids_of(num_frames)
        chosen = strategy_of(strategy, row_lag, frame_lag, raster=raster, exact=exact)
        action_ids = self.action_ids(actions, num_frames, "generated frame")
        prompt, context = self.prompt(frames, context_actions)
        if self.tokenizer.temporal_compression > 1:
            check_clip(len(frames), num_frames, len(context) + num_grids, self.config)
        out = generate_tokens(
            self.model,
            prompt,
            chosen,
            action_ids,
            context_frames=len(context),
            sampling=self.sampling(sampling),
            seed=seed,
            grid=TokenGrid(num_grids, self.height, self.width),
            context=text,
            keep_frames=self.defaults.keep_frames,
            runner=self.runner,
        )
        tokens = out.tokens[0]
        if self.tokenizer.temporal_compression > 1:  # a grid's pixels depend on those before it
            whole = self.tokenizer.decode(torch.cat([context, tokens]))
            return GeneratedVideo(whole[-num_frames:].cpu(), tokens, out.stats)
        return GeneratedVideo(self.tokenizer.decode(tokens).cpu(), tokens, out.stats)

    def grids_of(self, num_frames: int) -> int:
        """Return the token grids of so many generated frames, or raise ValueError if uneven."""
        step = self.tokenizer.temporal_compression
        if num_frames % step:
            raise ValueError(
                f"num_frames must be a multiple of {step}: the tokenizer joins so many frames, "
                f"got {num_frames}"
            )
        return num_frames // step

    def stream(
        self,
        frames: Tensor,
        actions: Iterator[str],
        row_lag: int | None = None,
        *,
        strategy: Strategy | str | None = None,
        **settings: Any,
    ) -> Iterator[Tensor]:
        """Yield a frame for every action, as long as actions come; each (H_px, W_px, 3) uint8.

        Old frames leave the context when it is full (see `Stream`).

        Args:
            row_lag, strategy: as in `generate`.
            settings: what `start` takes (context_actions, sampling, seed).
        """
        engine, chosen = self.start(frames, **settings), strategy_of(strategy, row_lag)
        for action in actions:
            for tokens in engine.decode(chosen, self.action_ids([action], 1, "generated frame"), 1):
                yield self.tokenizer.decode(tokens)[0].cpu()

    def start(
        self,
        frames: Tensor,
        *,
        context_actions: Sequence[str] | None = None,
        sampling: SamplingOptions | None = None,
        seed: int = 0,
    ) -> DecodingEngine:
        """Return an engine that has read the context frames, to be driven frame by frame.

        Each frame may have a strategy of its own: `engine.decode("k=1",
        world.action_ids([action], 1, "frame"), 1)` yields its tokens.
        """
        engine = DecodingEngine(
            self.model,
            self.height,
            self.width,
            num_action_tokens=self.vocabulary.num_tokens if self.vocabulary else 0,
            sampling=self.sampling(sampling),
            seed=seed,
            keep_frames=self.defaults.keep_frames,
            runner=self.runner,
        )
        prompt, context = self.prompt(frames, context_actions)
        engine.prefill(prompt, len(context))
        return engine

    def check(self, strategy: Strategy, sampling: SamplingOptions | None = None) -> None:
        """Raise ValueError where this world cannot decode so."""
        temperature = self.sampling(sampling).temperature
        grid = TokenGrid(1, self.height, self.width)
        strategy.check(Conditions(temperature, grid, replays=self.runner != "eager"))

    def action_ids(self, actions: Sequence[str] | None, count: int, what: str) -> Tensor | None:
        """Return (1, count, num_tokens) ids, or None for a model without actions.

        Raises:
            ValueError: not `count` actions, or one that the model does not know.
        """
        ids = action_ids(self.vocabulary, actions, count, what, self.tokenizer.codebook_size)
        return None if ids is None else ids.to(self.model.device)

    def prompt(
        self, frames: Tensor, context_actions: Sequence[str] | None
    ) -> tuple[Tensor, Tensor]:
        """Return (1, P) tokens of prefix, context frames and actions between; and the grids."""
        check_size(frames, self.frame_size_px)
        grids = self.tokenizer.encode(frames.to(self.model.device))
        ids = self.action_ids(context_actions, len(grids) - 1, "context frame after the first")
        return prompt_tokens(prefix_ids(self.config), grids, ids), grids

    def sampling(self, options: SamplingOptions | None = None) -> SamplingOptions:
        """Return how tokens are drawn: as asked for, else by default; visual ids only."""
        return self.defaults.sampling(options, self.valid_range)
