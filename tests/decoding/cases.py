"""What the decoding tests share: tiny models and drawn decoding problems."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.model import ModelWrapper
from diagd.decoding.sampling import Draw, ValidRanges, gumbel_noise
from diagd.decoding.schedule import RowStart
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from tests import oracles
from tests.models.tiny import tiny_fields

VOCAB_SIZE = 24
NUM_VISUAL = 18  # ids [0, 18) are visual, the others are action ids
MAX_POSITIONS = 320
MODELS = ("huggingface", "own", "native")
ROW_STARTS: tuple[RowStart, ...] = ("temporal", "predecessor", "spatial", "action")


@cache
def llama() -> LlamaForCausalLM:
    return oracles.tiny_llama(VOCAB_SIZE, MAX_POSITIONS)


@cache
def model_of(name: str) -> diagd.HuggingFaceModel | Transformer | NativeModel:
    """Return the tiny Llama behind diagd's protocol: transformers', our own, or our kernels."""
    if name == "huggingface":
        return diagd.HuggingFaceModel(llama())
    fields = tiny_fields(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=VOCAB_SIZE,
        image_vocab_size=NUM_VISUAL,
        max_positions=MAX_POSITIONS,
        num_action_tokens=0,
        norm_eps=llama().config.rms_norm_eps,
    )
    model = Transformer(ModelConfig(**fields))
    model.load_state_dict(llama().state_dict())
    return NativeModel(model) if name == "native" else model


@cache
def full_forward() -> oracles.LogitsFn:
    return oracles.llama_logits(llama())


@torch.no_grad()
def causal_forward(tokens: Tensor) -> Tensor:
    return llama()(tokens, use_cache=False).logits


@dataclass(frozen=True)
class Case:
    """One decoding problem: a stream's shape, its schedule and what it is conditioned on."""

    num_frames: int = 3
    height: int = 3
    width: int = 5
    row_lag: int = 2
    frame_lag: int = 4
    num_action_tokens: int = 0
    context_frames: int = 1
    prefix_length: int = 1
    batch_size: int = 2
    row_start: RowStart = "temporal"
    seed: int = 0

    @property
    def grid(self) -> diagd.TokenGrid:
        return diagd.TokenGrid(self.num_frames, self.height, self.width)

    @property
    def schedule(self) -> diagd.DiagonalSchedule:
        return diagd.DiagonalSchedule(self.grid, self.row_lag, self.frame_lag, self.row_start)

    @property
    def strategy(self) -> diagd.Diagonal:
        return diagd.Diagonal(self.row_lag, self.frame_lag, self.row_start)

    @property
    def prompt(self) -> Tensor:
        """(B, P): the prefix, then the context frames with action tokens between them."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = [self._ids(generator, self.prefix_length, 0, VOCAB_SIZE)]
        for t in range(self.context_frames):
            if t > 0:
                parts.append(self._ids(generator, self.num_action_tokens, NUM_VISUAL, VOCAB_SIZE))
            parts.append(self._ids(generator, self.height * self.width, 0, NUM_VISUAL))
        return torch.cat(parts, dim=1)

    def actions(self, num_frames: int | None = None, seed: int = 1) -> Tensor | None:
        """(B, T, n) action ids, or None when the stream has none."""
        if self.num_action_tokens == 0:
            return None
        num_frames = self.num_frames if num_frames is None else num_frames
        generator = torch.Generator().manual_seed(self.seed + seed)
        ids = self._ids(generator, num_frames * self.num_action_tokens, NUM_VISUAL, VOCAB_SIZE)
        return ids.reshape(self.batch_size, num_frames, self.num_action_tokens)

    def _ids(self, generator: torch.Generator, length: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self.batch_size, length), generator=generator)

    def reference(self, sample_fn: oracles.SampleFn = oracles.greedy) -> oracles.ReferenceStream:
        """Return the cache-free stream of this problem."""
        return oracles.ReferenceStream(
            full_forward(),
            self.prompt,
            self.height,
            self.width,
            self.num_action_tokens,
            self.context_frames,
            self.row_start,
            sample_fn,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a problem whose grid is never square."""
    height = draw(st.integers(1, 3))
    width = draw(st.integers(2, 5).filter(lambda width: width != height))
    row_lag = draw(st.integers(1, width))
    context_frames = draw(st.integers(0, 2))
    num_action_tokens = draw(st.integers(0, 2))
    may_be_empty = context_frames > 0 or num_action_tokens > 0
    return Case(
        num_frames=draw(st.integers(1, 3)),
        height=height,
        width=width,
        row_lag=row_lag,
        frame_lag=draw(st.integers(1, (height - 1) * row_lag + width)),
        num_action_tokens=num_action_tokens,
        context_frames=context_frames,
        prefix_length=draw(st.integers(0 if may_be_empty else 1, 4)),
        batch_size=draw(st.integers(1, 2)),
        row_start=draw(st.sampled_from(ROW_STARTS)),
        seed=draw(st.integers(0, 1000)),
    )


def noise_of(
    seeds: Tensor, frames: Tensor, rows: Tensor, columns: Tensor, low: int, high: int
) -> Tensor:
    """Return the noise of ids at places, (B, L, high - low)."""
    ranges, places = ValidRanges(low, high, None), (frames, rows, columns)
    return gumbel_noise(Draw(diagd.SamplingOptions(), ranges, seeds, *places), low, high)


def reference_sampler(
    seeds: list[int],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    valid_range: tuple[int, int] | Tensor | None = None,
) -> oracles.SampleFn:
    """Draw argmax(log p + g) in numpy, one token at a time, with the project's own noise g.

    Args:
        seeds: one per batch row.
        valid_range: (low, high), or int64 (height, width, 2).
    """

    def sample_fn(logits: Tensor, frame: int, row: int, column: int) -> Tensor:
        low, high = 0, logits.shape[-1]
        if isinstance(valid_range, Tensor):
            low, high = valid_range[row, column].tolist()
        elif valid_range is not None:
            low, high = valid_range
        place = torch.tensor([[frame], [row], [column]])
        noise = noise_of(torch.tensor(seeds), place[0], place[1], place[2], low, high)[:, 0]
        ids = []
        for b in range(logits.shape[0]):
            if temperature == 0.0:
                ids.append(low + int(logits[b, low:high].argmax()))
                continue
            kept = oracles.filtered_probabilities(
                logits[b, low:high].numpy(), temperature, top_k, top_p
            )
            with np.errstate(divide="ignore"):
                ids.append(low + int((np.log(kept) + noise[b].numpy()).argmax()))
        return torch.tensor(ids)

    return sample_fn


class Passing(ModelWrapper[Any]):
    """A model that passes everything on to another one."""

    def __getattr__(self, name) -> Any:
        return getattr(self.model, name)


class Resampled(Passing):
    """A model with a sampler of its own."""

    def __init__(self, model, sample) -> None:
        super().__init__(model)
        self.draw_tokens = sample

    def sample(self, logits, draw):
        return self.draw_tokens(logits, draw)
