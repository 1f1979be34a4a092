"""What every training run is told, and what follows from it.

A run ends after a number of steps, after a time, or when the first of both is over, and the
learning rate falls towards that end. Time is what was spent in training, over all kills.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from diagd.backends.native.compiler import find_compiler
from diagd.flags import OutputFolder
from diagd.tokenizers.shards import TokenClips
from diagd.training.setup import OptimizerName

BATCH_TOKENS = 5000  # of a step and process, where no batch size is given
WARM_UP_STEPS = 50
LEAST_COMPILED_S = 600.0  # compiling takes about a minute


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What every training run is told."""

    tokens: Path  # folder from diagd tokenize, or of token shards
    out: OutputFolder  # checkpoint folder to write; a run that was killed goes on from here
    validation: Path | None = None  # folder of held-out token shards; default: those in --tokens
    frames: int = 8  # frames of a training sequence
    hold: float = 0.0  # share of frames that repeat the one before, under the action "none"
    steps: int | None = None  # optimiser steps
    minutes: float | None = None  # minutes of training; with --steps, what ends first
    hours: float | None = None  # the same in hours; added to --minutes
    batch_size: int | None = None  # sequences a step and process; default: about 5,000 tokens
    learning_rate: float = 3e-4  # peak; decays along a cosine to a tenth
    warmup_steps: int | None = None  # of linear warm-up; default 50, or a twentieth of --steps
    optimizer: OptimizerName = "adamw"  # muon learns faster per token: for the blocks' matrices
    weight_decay: float = 0.1  # of matrices; betas of AdamW are (0.9, 0.95)
    clip_norm: float = 1.0  # gradients are scaled down to this norm
    precision: str = "auto"  # bf16 autocast, no (float32), or what multiplies faster here
    compile: bool = True  # torch.compile the loss, if there is a compiler and time: ten minutes
    seed: int = 0  # of weights and batches
    log_every: int = 20  # steps between lines of log.jsonl
    save_minutes: float = 5.0  # minutes between checkpoints

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("batch_size", 1), ("log_every", 1), ("frames", 2)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        for name in ("minutes", "hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        most = math.inf if self.steps is None else self.steps
        if not 0 <= self.warm_up < most:
            raise ValueError(f"warmup_steps must be in [0, steps={most}), got {self.warmup_steps}")
        if not 0 <= self.hold < 1:
            raise ValueError(f"hold must be in [0, 1), got {self.hold}")
        for name in ("seed", "weight_decay", "save_minutes"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be 0 or more, got {self.learning_rate}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {self.clip_norm}")
        if self.precision not in ("auto", "bf16", "no"):
            raise ValueError(f"precision must be auto, bf16 or no, got {self.precision!r}")

    @property
    def seconds(self) -> float | None:
        """How long to train at most; None: as long as the steps take."""
        if self.minutes is None and self.hours is None:
            return None
        return 60 * (self.minutes or 0) + 3600 * (self.hours or 0)

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return WARM_UP_STEPS if self.steps is None else min(WARM_UP_STEPS, self.steps // 20)

    @property
    def compiles(self) -> bool:
        """Whether the loss is compiled: where that is wanted and possible, and pays."""
        is_long = self.seconds is None or self.seconds >= LEAST_COMPILED_S
        return self.compile and is_long and find_compiler() is not None

    def length_of(self, clips: TokenClips) -> int:
        """Return the tokens of a sequence: its frames, and the actions between them."""
        return self.frames * (clips.tokens[0, 0].numel() + 1) - 1

    def batch_of(self, clips: TokenClips) -> int:
        """Return the sequences of a step and process."""
        return self.batch_size or max(1, round(BATCH_TOKENS / self.length_of(clips)))

    def share_done(self, step: int, seconds: float, warm_up: int = 0) -> float:
        """Return how much of a run, but for a warm-up, is over after so many steps and seconds."""
        shares = [0.0]
        if self.steps is not None:
            shares.append((step - warm_up) / (self.steps - warm_up))
        if self.seconds is not None:
            shares.append(seconds / self.seconds)
        return min(max(shares), 1.0)

    def learning_rate_at(self, step: int, seconds: float = 0.0) -> float:
        """Linear warm-up, then a cosine from the peak to a tenth of it."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = self.share_done(step, seconds, self.warm_up)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
