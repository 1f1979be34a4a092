"""Pixels in, pixels out: a world model and its tokenizer, dreaming on from a few frames.

import diagd
world = diagd.VideoGenerator.from_pretrained("doom")
video = world.generate(frames, ["forward"] * 16, num_frames=16, row_lag=1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diagd.backends import Backend, prepare
from diagd.data.actions import ActionVocabulary
from diagd.data.tokenizers import VideoTokenizer, VQTokenizer
from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.generate import GenerationStats, generate_tokens
from diagd.decoding.plan import RowStart
from diagd.decoding.runner import CausalModel, RunnerName
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.models.checkpoints import load_model, model_folder


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
        vocabulary: ActionVocabulary | None,
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
        folder = model_folder(name_or_path)
        tokenizer = VQTokenizer.from_pretrained(folder / "tokenizer")
        model = load_model(folder, device=device, dtype=dtype)
        config = model.config
        if tokenizer.codebook_size != config.image_vocab_size:
            raise ValueError(
                f"{folder}: the model has {config.image_vocab_size} visual ids, "
                f"its tokenizer {tokenizer.codebook_size} codes"
            )
        vocabulary = None
        if config.num_action_tokens:
            vocabulary = ActionVocabulary.load(folder / "actions.json")
            if config.num_action_tokens != 1 or len(vocabulary.names) != (
                config.vocab_size - config.image_vocab_size
            ):
                raise ValueError(
                    f"{folder}: actions.json names {len(vocabulary.names)} actions of one token, "
                    f"the model has {config.vocab_size - config.image_vocab_size} action ids and "
                    f"{config.num_action_tokens} tokens an action"
                )
        prepared, runner, _ = prepare(model, backend, int8)
        tokenizer.to(device)
        height, width = config.grid_height, config.grid_width
        return cls(prepared, tokenizer, height, width, vocabulary, runner)

    @property
    def frame_size_px(self) -> tuple[int, int]:
        """Height and width of a frame in pixels."""
        scale = self.tokenizer.compression
        return self.height * scale, self.width * scale

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
    ) -> GeneratedVideo:
        """Dream on from context frames.

        Args:
            frames: (m, H_px, W_px, 3) uint8 RGB, the context, of `frame_size_px`.
            actions: one action name for each generated frame, that leads to it.
            frame_lag: steps between frames; None finishes a frame before the next begins.
            context_actions: the m - 1 actions between the context frames.
            raster: next-token prediction instead of diagonals.
            sampling: `DEFAULT_SAMPLING` by default; visual ids only in any case.

        Raises:
            ValueError: frames or actions that do not fit.
        """
        grid = TokenGrid(num_frames, self.height, self.width)
        if raster:
            schedule = DiagonalSchedule.raster(grid)
        elif frame_lag is None:
            schedule = DiagonalSchedule.spatial(grid, row_lag)
        else:
            schedule = DiagonalSchedule(grid, row_lag, frame_lag)
        action_ids = self._action_ids(actions, num_frames, "generated frame")
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
    ) -> Iterator[Tensor]:
        """Dream a frame for every action, as long as actions come; each is (H_px, W_px, 3) uint8.

        Old frames leave the context when it is full (see `DiagonalEngine`).
        """
        engine = DiagonalEngine(
            self.model,
            self.height,
            self.width,
            num_action_tokens=1,
            row_start=row_start,
            sampling=self._visual(sampling),
            seed=seed,
            runner=self.runner,
        )
        engine.prefill(self._prompt(frames, context_actions), len(frames))
        schedule = DiagonalSchedule.spatial(TokenGrid(1, self.height, self.width), row_lag)
        for action in actions:
            ids = self._action_ids([action], 1, "generated frame")
            for tokens in engine.decode(schedule, ids):
                yield self.tokenizer.decode(tokens)[0].cpu()

    def _prompt(self, frames: Tensor, context_actions: Sequence[str] | None) -> Tensor:
        """Return (1, P) tokens of the context frames with the actions between them."""
        height_px, width_px = self.frame_size_px
        if frames.ndim != 4 or frames.shape[1:] != (height_px, width_px, 3):
            raise ValueError(
                f"frames must be (T, {height_px}, {width_px}, 3) uint8, got {tuple(frames.shape)}"
            )
        visual = self.tokenizer.encode(frames.to(self.model.device)).flatten(1)
        ids = self._action_ids(context_actions, len(frames) - 1, "context frame after the first")
        if ids is None:
            return visual.flatten()[None]
        first = ids.new_zeros(1, 1)  # stands before the first frame, and is cut off
        between = torch.cat([first, ids[0]])
        return torch.cat([between, visual], dim=1).flatten()[None, 1:]

    def _action_ids(self, actions: Sequence[str] | None, count: int, what: str) -> Tensor | None:
        """Return (1, count, 1) ids, or None for a model without actions."""
        if self.vocabulary is None:
            if actions:
                raise ValueError("this model takes no actions")
            return None
        given = len(actions) if actions is not None else 0
        if given != count:
            raise ValueError(f"expected {count} actions, one for each {what}, got {given}")
        ids = [self.vocabulary.id_of(name) + self.tokenizer.codebook_size for name in actions or ()]
        return torch.tensor(ids, dtype=torch.int64, device=self.model.device).view(1, count, 1)

    def _visual(self, sampling: SamplingOptions | None) -> SamplingOptions:
        sampling = sampling or DEFAULT_SAMPLING
        if sampling.valid_range is not None:
            return sampling
        return SamplingOptions(
            sampling.temperature, sampling.top_k, sampling.top_p, (0, self.tokenizer.codebook_size)
        )


DEFAULT_SAMPLING = SamplingOptions(temperature=1.0, top_p=0.9)
