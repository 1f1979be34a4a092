"""What `diagd check` and `diagd tokenize` are told."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from diagd.backends.native.compiler import find_compiler
from diagd.decoding.schedule import RowStart, check_row_start
from diagd.decoding.strategies.strategy import (
    Conditions,
    Diagonal,
    Strategy,
    parse_strategies,
    parse_strategy,
)
from diagd.families.presets import PRESETS, available_models
from diagd.flags import Device, OutputFolder, RowLags
from diagd.tokenizers.options import TokenizerOptions


@dataclass(frozen=True)
class CheckOptions:
    """Check clips (NAME.mp4 with NAME.jsonl, one action a frame); problems end in exit code 2."""

    clips: Annotated[Path, tyro.conf.Positional]  # folder of clips


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(TokenizerOptions):
    """Turn recorded clips into a folder that `diagd train` takes: tokens, tokenizer, scenes."""

    out: OutputFolder  # folder to write; a killed run goes on from here
    heldout: Path | None = None  # folder of held-out clips; default: a share of the clips
    heldout_share: float = 0.1  # which share: every tenth clip by name
    tokenizer: Path | None = None  # trained tokenizer to apply as it is, instead of training
    actions: Path | None = None  # actions.json with the order of actions; else as in the clips

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.heldout_share <= 0.5:
            raise ValueError(f"heldout_share must be in (0, 0.5], got {self.heldout_share}")
        if self.tokenizer is not None and self.init is not None:
            raise ValueError("--tokenizer is applied as it is; to train it further use --init")


OptimizerName = Literal["adamw", "muon"]
CorruptWith = Literal["uniform", "samples"]
DEFAULT_MINUTES = 20.0
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

    def length_of(self, clips: Any) -> int:
        """Return the tokens of a sequence of `TokenClips`: frames, and actions between them."""
        return self.frames * (clips.tokens[0, 0].numel() + 1) - 1

    def batch_of(self, clips: Any) -> int:
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


@dataclass(frozen=True)
class Mixture:
    """Strategies and how often each is drawn.

    Attributes:
        weights: strategies with a schedule, and a number above 0 for each.
    """

    weights: dict[Strategy, float]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Mixture":
        """Read names, of which a text may hold several with spaces between, each `NAME[:WEIGHT]`.

        Raises:
            ValueError: no name, one that is none, is named twice or has no schedule, or a weight
                that is no number above 0.
        """
        weights: dict[Strategy, float] = {}
        for word in (word for text in texts for word in text.split()):
            name, _, weight = word.partition(":")
            strategy = parse_strategy(name)
            if not strategy.has_schedule:
                raise ValueError(
                    f"strategies must have a schedule (raster, k=..., zipar=...), got {name!r}"
                )
            if strategy in weights:
                raise ValueError(f"strategies must be named once each, got {strategy} twice")
            weights[strategy] = _weight(weight, word) if ":" in word else 1.0
        if not weights:
            raise ValueError("strategies must name at least one, such as k=1")
        return cls(weights)

    def __str__(self) -> str:
        """Return the spelling that `parse` reads."""
        return " ".join(
            f"{strategy}" + (f":{weight:g}" if weight != 1 else "")
            for strategy, weight in self.weights.items()
        )


def _weight(text: str, word: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ValueError(f"a strategy's weight must be a number above 0, as in k=1:2, got {word!r}")
    return weight


def check_corruption(share: float, kind: str) -> None:
    """Raise ValueError unless a share below 1 of the tokens can be replaced by the kind."""
    if not 0 <= share < 1:
        raise ValueError(f"corrupt must be in [0, 1), got {share}")
    if kind not in get_args(CorruptWith):
        raise ValueError(
            f"corrupt_with must be one of {', '.join(get_args(CorruptWith))}, got {kind!r}"
        )
    if kind != "uniform" and not share:
        raise ValueError(f"corrupt_with={kind} needs --corrupt, a share above 0")


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(LoopOptions):
    """What a training run is told of schedules."""

    strategies: tuple[str, ...]  # drawn for each step; with weights: raster k=1:2 k=1,d=14
    context_frames: int  # frames at the start that are given, in raster order, and not learnt
    # frames that may be seen, the one under way included, as in a stream that has outgrown its
    # context; longer sequences are read in one go all the same. Default: all of a sequence
    window: int | None = None
    corrupt: float = 0.0  # feed wrong tokens: a share of them, drawn for each step from 0 to this
    # wrong tokens: any (uniform), or what the model itself would draw in their place (samples)
    corrupt_with: CorruptWith = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        for strategy in self.mixture().weights:
            strategy.check(Conditions(temperature=0))
        check_corruption(self.corrupt, self.corrupt_with)
        if not 0 <= self.context_frames < self.frames:
            raise ValueError(
                f"context_frames must be in [0, frames={self.frames}), got {self.context_frames}"
            )

        least = max(2, self.context_frames)
        if self.window is not None and not least <= self.window < self.frames:
            raise ValueError(
                f"window must be in [{least}, frames={self.frames}): what has more frames outgrows "
                f"it; got {self.window}"
            )

    @property
    def frames_held(self) -> int:
        """Frames that a model's context has to hold."""
        return self.window or self.frames

    def mixture(self) -> Mixture:
        """Return the strategies and their weights."""
        return Mixture.parse(self.strategies)

    def purpose(self) -> dict[str, object]:
        """Return what a run is for; two runs that differ in it are not the same one."""
        wrong = {"corrupt": self.corrupt, "corrupt_with": self.corrupt_with} if self.corrupt else {}
        return {
            "strategies": str(self.mixture()),
            "context_frames": self.context_frames,
            "frames": self.frames,
            **({"window": self.window} if self.window else {}),
            **wrong,
        }


@dataclass(frozen=True, kw_only=True)
class TrainOptions(MixtureOptions):
    """Train a world model on what `diagd tokenize` wrote; the result is a folder to play.

    Without --steps it takes 20 minutes, and a model that fits the time.
    """

    # preset, such as mc-ar-128x3, mc-ar-320x6, mc-ar-42m; default: sized to the time
    model: str | None = None
    init: str | None = None  # checkpoint folder to take the weights from, instead of random ones
    # peak; decays along a cosine to a tenth. Give mc-ar-42m and up 3e-4
    learning_rate: float = 3e-3
    # muon for the blocks' matrices and adamw for the rest, or adamw for all
    optimizer: OptimizerName = "muon"
    # one is drawn for each step, with weights: raster k=1:2 k=1,d=14; a world is played under k=1
    strategies: tuple[str, ...] = ("raster", "k=1")
    context_frames: int = 0  # frames at the start, in raster order, that are not learnt

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model is not None and self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        super().__post_init__()

    @property
    def seconds(self) -> float | None:
        """How long to train at most; None: as long as the steps take."""
        given = super().seconds
        return 60 * DEFAULT_MINUTES if given is None and self.steps is None else given


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(MixtureOptions):
    """Finetune a model for diagonal schedules; the result is a folder that `generate` takes."""

    init: str  # model to start from: doom, or a checkpoint folder
    # one is drawn for each step, with weights: raster k=1:2 k=1,d=14; one model learns them all
    strategies: tuple[str, ...] = ("raster", "k=1", "k=2")
    context_frames: int = 1  # frames at the start, in raster order, that are not learnt
    steps: int = 5000  # optimiser steps
    learning_rate: float = 1e-3  # peak; decays along a cosine to a tenth
    optimizer: OptimizerName = "muon"  # for the blocks' matrices, and adamw for the rest; or adamw
    warmup_steps: int = 100  # steps of linear warm-up


Axis = Literal["frame", "row", "column"]
ROW_STARTS: tuple[RowStart, ...] = ("predecessor", "temporal", "spatial")


@dataclass(frozen=True)
class TuneOptions:
    """Measure what strategies cost a model on held-out clips; name the fastest within tolerance.

    Candidates are those with a schedule: k=1, k=2,d=28/predecessor, zipar=4. Raster is always in.
    """

    tokens: Path  # folder from diagd tokenize, whose held-out part is taken, or of token shards
    model: str = "doom"  # bundled model or checkpoint folder
    baseline: str | None = None  # model whose raster order is the yardstick; default: the model's
    tolerance: float = 0.02  # nats a token above raster that a strategy may cost
    strategy: tuple[str, ...] = ()  # candidates by name; none: the diagonals of the next three
    row_lag: RowLags = ()  # default 1, 2, 4, 8
    overlap: bool = False  # actions are known ahead, so frames may overlap
    row_start: tuple[RowStart, ...] = ROW_STARTS  # stand-ins to try
    by: tuple[Axis, ...] = ()  # show the gap by frame, row or column, too
    clips: int | None = None  # held-out clips to judge by; default 16, or all
    frames: int | None = None  # frames of a clip; default: as many as the model holds
    context_frames: int = 1  # of them, frames that are given
    seed: int = 0  # of the place of a window in its clip
    device: Device = "cpu"  # cpu, cuda, cuda:1
    out: OutputFolder | None = None  # folder for tune.json and plots
    make_default: bool = False  # let the model's folder decode so where nothing else is asked for

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more, got {self.tolerance}")
        for name in ("clips", "context_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.make_default and self.model in available_models():
            raise ValueError(f"make_default changes a folder of yours, and {self.model} is bundled")
        if not self.row_start:
            raise ValueError("row_start must name at least one policy")
        for row_start in self.row_start:
            check_row_start(row_start)
        if self.strategy and (self.row_lag or self.overlap or self.row_start != ROW_STARTS):
            raise ValueError("strategy names the candidates: leave row_lag, overlap, row_start out")
        self.named()
        for row_lag in self.row_lag:
            Diagonal(row_lag).check(Conditions(temperature=0))

    def named(self) -> list[Strategy]:
        """Return the candidates that `strategy` names.

        Raises:
            ValueError: no such strategy, or one without a schedule.
        """
        named: list[Strategy] = []
        for strategy in parse_strategies(self.strategy):
            if not strategy.has_schedule:
                raise ValueError(f"tune compares schedules: leave {strategy} out")
            strategy.check(Conditions(temperature=0))
            named.append(strategy)
        return named
