"""Options of the commands from clips to a world: check, tokenize, train and so on."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import tyro

from diagd.backends.native.compiler import find_compiler
from diagd.checks import check_at_least, check_values, parse_size
from diagd.decoding.schedule import RowStart
from diagd.decoding.strategies.table import (
    Diagonal,
    Strategy,
    parse_strategies,
    parse_strategy,
)
from diagd.families.presets import PRESETS, available_models
from diagd.flags import Device, OutputFolder, RowLags

OF_LEROBOT = ("camera", "vectors", "every", "bins")
# of a run on clips, which images have not
OF_CLIPS = ("frames", "context_frames", "hold", "window", "sliding_frames", "corrupt", "validation")
TOKENIZER_MINUTES, WORLD_MINUTES = 5.0, 20.0  # default training times


@dataclass(frozen=True)
class CheckOptions:
    """Check clips (NAME.mp4 with NAME.jsonl, one action per frame); exit code 2 on problems."""

    clips: Annotated[Path, tyro.conf.Positional]  # folder of clips


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Tokenize recorded clips into a folder for `diagd train`: tokens, tokenizer, scenes."""

    steps: int | None = None  # optimizer steps of the tokenizer's training
    minutes: float | None = None  # minutes of the tokenizer's training; default: 5, or --steps
    batch_size: int = 8  # frames per step
    learning_rate: float = 1e-3  # peak learning rate; linear warm-up, then a cosine to zero
    decoder_only: bool = False  # keep encoder and codebook fixed: tokens stay the same
    # discriminator weight: 0.05 keeps textures that squared errors blur, at a cost of 0.1 to 0.4 dB
    sharpen: float = 0.0
    seed: int = 0  # seed of the weights and of the order of frames
    threads: int = 2  # number of workers, each with a share of the batch
    device: Device = "cpu"  # run on cpu or cuda
    # folder of videos (NAME.mp4), with actions in NAME.jsonl if there are any; or see --lerobot
    clips: Path | None = None
    lerobot: Path | None = None  # folder of a LeRobot dataset, v2.1 or v3.0: vectors are actions
    camera: str | None = None  # of a LeRobot dataset with several, such as top
    # features of a LeRobot dataset whose numbers are an action: action, observation.state
    vectors: tuple[str, ...] = ("action",)
    every: int | None = None  # of a LeRobot dataset, every n-th frame; default: about 10 a second
    bins: int = 64  # ids for the numbers of each axis of a vector
    size: str | None = None  # crop and scale frames to this height and width, such as 64x96
    init: Path | None = None  # tokenizer to start training from, instead of from scratch
    patch: int | None = None  # pixels per token side; default: 8, or a divisor of the frame size
    codes: int = 1024  # codebook size when training from scratch
    frame_stride: int = 4  # train and measure on every n-th frame; these frames are held in memory
    checkpoint_s: float = 60.0  # seconds between checkpoints
    out: OutputFolder  # folder to write; a killed run resumes from here
    heldout: Path | None = None  # folder of held-out clips; default: a share of the clips
    heldout_share: float = 0.1  # share to hold out: 0.1 is every tenth clip by name
    tokenizer: Path | None = None  # trained tokenizer to use unchanged, instead of training
    actions: Path | None = None  # actions.json with the order of actions; default: as in the clips

    def __post_init__(self) -> None:
        check_at_least(self, steps=1, batch_size=1, threads=1, codes=1, frame_stride=1, patch=1)
        check_at_least(self, sharpen=0, seed=0, checkpoint_s=0, every=1, bins=2)
        if (self.clips is None) == (self.lerobot is None):
            raise ValueError("give either --clips or --lerobot, a folder of what was recorded")
        given = [name for name in OF_LEROBOT if getattr(self, name) != getattr(type(self), name)]
        if self.clips is not None and given:
            raise ValueError(f"--{given[0]} is only for --lerobot")
        if self.lerobot is not None and (self.heldout or self.actions):
            name = "heldout" if self.heldout else "actions"
            raise ValueError(f"{name} must be left out with lerobot")
        check_values(
            self,
            ("minutes", self.minutes is None or 0 < self.minutes < math.inf, "above 0"),
            (
                "batch_size",
                self.batch_size % self.threads == 0,
                f"a multiple of threads={self.threads}",
            ),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("heldout_share", 0 < self.heldout_share <= 0.5, "in (0, 0.5]"),
        )
        clips, out = self.recorded.resolve(), self.out.resolve()
        if self.heldout is not None and self.heldout.resolve().is_relative_to(clips):
            raise ValueError(f"heldout must not be inside clips, got {self.heldout}")
        for folder in (clips, (self.heldout or self.recorded).resolve()):
            if out.is_relative_to(folder) or folder == out / "scenes":
                raise ValueError(f"out must not be inside the folders of clips, got {self.out}")
        if self.patch is not None and (self.init or self.tokenizer):
            raise ValueError("patch must be left out: --init or --tokenizer sets it")
        if self.tokenizer is not None and self.init is not None:
            raise ValueError("tokenizer is used unchanged: to train it further give it as --init")
        _ = self.size_px

    @property
    def recorded(self) -> Path:
        """The folder of what was recorded, clips or a LeRobot dataset."""
        folder = self.clips or self.lerobot
        assert folder is not None
        return folder

    def share_done(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done: by steps, time, or the larger."""
        minutes = self.minutes or (None if self.steps else TOKENIZER_MINUTES)
        by_steps = step / self.steps if self.steps else 0.0
        return max(by_steps, seconds / (60 * minutes) if minutes else 0.0)

    @property
    def size_px(self) -> tuple[int, int] | None:
        """Height and width to fit frames to, or ValueError; None: as stored."""
        return parse_size(self.size, unit=2, least=10)  # as videos require


# Linear layers that adapters change, in every block
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CorruptWith = Literal["uniform", "samples"]
BATCH_TOKENS = 5000  # tokens per step and process, if no batch size is given
WARM_UP_SHARE = 1 / 20  # maximum share of a run, if no number of steps is given
MIN_COMPILED_S = 600.0  # compiling takes one to four minutes


def parse_mixture(texts: Iterable[str]) -> dict[Strategy, float]:
    """Parse strategies with a schedule, and the weights by which they are drawn.

    A text may hold several, separated by spaces, each `NAME[:WEIGHT]`. ValueError unless all are
    different, have a schedule, and have weights above 0.
    """
    weights: dict[Strategy, float] = {}
    for word in " ".join(texts).split():
        name, colon, weight = word.partition(":")
        if not (strategy := parse_strategy(name)).has_schedule:
            raise ValueError(
                f"strategies must have a schedule (raster, k=..., zipar=...), got {name!r}"
            )
        if strategy in weights:
            raise ValueError(f"strategies must differ, got {strategy} twice")
        try:
            weights[strategy] = float(weight) if colon else 1.0
        except ValueError:
            weights[strategy] = 0.0
        if not 0 < weights[strategy] < math.inf:
            raise ValueError(
                f"a strategy's weight must be a number above 0, as in k=1:2, got {word!r}"
            )
    if not weights:
        raise ValueError("strategies must not be empty, expected one such as k=1")
    return weights


def spell_mixture(weights: Mapping[Strategy, float]) -> str:
    return " ".join(f"{one}:{weight:g}".removesuffix(":1") for one, weight in weights.items())


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every training run."""

    tokens: Path | None  # folder from diagd tokenize, or of token shards
    out: OutputFolder  # checkpoint folder to write; a killed run resumes from here
    validation: Path | None = None  # folder of held-out token shards; default: those in --tokens
    frames: int = 8  # frames per training sequence
    hold: float = 0.0  # share of frames that repeat the previous one, under the action "none"
    steps: int | None = None  # optimizer steps
    minutes: float | None = None  # minutes of training; with --steps, the first limit ends it
    hours: float | None = None  # hours of training, added to --minutes
    # instead of steps, minutes and hours: train a finished run for this many more minutes; if
    # killed, the same command resumes it and keeps its end
    more_minutes: float | None = None
    batch_size: int | None = None  # sequences per step and process; default: about 5,000 tokens
    learning_rate: float  # peak learning rate; decays along a cosine to a tenth
    # steps of linear warm-up; default: 50 (finetune: 100), at most a twentieth of the run
    warmup_steps: int | None = None
    # muon for the matrices of blocks and adamw for the rest, or adamw for all
    optimizer: Literal["adamw", "muon"] = "muon"
    weight_decay: float = 0.1  # weight decay of matrices; AdamW's betas are (0.9, 0.95)
    clip_norm: float = 1.0  # maximum gradient norm; larger gradients are scaled down
    precision: str = "auto"  # bf16 autocast, no (float32), or auto: the faster one here
    compile: bool = True  # torch.compile the loss, in runs of 10 minutes on a GPU or in bfloat16
    seed: int = 0  # seed of weights and batches
    log_every: int = 20  # steps between lines of log.jsonl
    save_minutes: float = 5.0  # minutes between checkpoints
    strategy: tuple[str, ...]  # strategies drawn for each step; with weights: raster k=1:2 k=1,d=14
    context_frames: int  # frames at the start that are given, in raster order, and not learned
    # maximum number of visible frames, including the current one, as in a stream with a full
    # context or a limit (play --remember); sequences are still read in one pass. Default: all
    window: int | None = None
    # limit all layers but the first to the positions of this many latest frames: a long context
    # costs less. Default: as in the model
    sliding_frames: int | None = None
    corrupt: float = 0.0  # maximum share of wrong input tokens; drawn per step from 0 to this
    # kind of wrong tokens: any (uniform), or drawn by the model in their place (samples)
    corrupt_with: CorruptWith = "uniform"
    max_warm_up: ClassVar[int] = 50  # steps

    def __post_init__(self) -> None:
        check_at_least(self, steps=1, batch_size=1, log_every=1, frames=2, sliding_frames=1)
        check_at_least(self, seed=0, weight_decay=0, save_minutes=0)
        max_steps = math.inf if self.steps is None else self.steps
        frames, kinds = self.frames, get_args(CorruptWith)
        min_window = max(2, self.context_frames)
        fits = self.window is None or min_window <= self.window < frames
        window_range = f"in [{min_window}, frames={frames})"
        check_values(
            self,
            ("minutes", self.minutes is None or 0 < self.minutes < math.inf, "above 0"),
            ("hours", self.hours is None or 0 < self.hours < math.inf, "above 0"),
            (
                "more_minutes",
                self.more_minutes is None or 0 < self.more_minutes < math.inf,
                "above 0",
            ),
            ("warmup_steps", 0 <= self.warm_up < max_steps, f"in [0, steps={max_steps})"),
            ("hold", 0 <= self.hold < 1, "in [0, 1)"),
            ("learning_rate", 0 <= self.learning_rate < math.inf, "0 or more"),
            ("weight_decay", self.weight_decay < math.inf, "finite"),
            ("clip_norm", self.clip_norm > 0, "above 0"),
            ("precision", self.precision in ("auto", "bf16", "no"), "auto, bf16 or no"),
            ("corrupt", 0 <= self.corrupt < 1, "in [0, 1)"),
            ("corrupt_with", self.corrupt_with in kinds, f"one of {', '.join(kinds)}"),
            ("context_frames", 0 <= self.context_frames < frames, f"in [0, frames={frames})"),
            ("window", fits, window_range),
        )
        for strategy in self.mixture:
            strategy.check()
        lengths = "steps", "minutes", "hours"
        given = [name for name in lengths if getattr(self, name) != getattr(type(self), name)]
        if self.more_minutes is not None and given:
            raise ValueError(f"{given[0]} must be left out with more_minutes")
        if self.corrupt_with != "uniform" and not self.corrupt:
            raise ValueError(f"corrupt_with={self.corrupt_with} needs a --corrupt above 0")

    @property
    def token_folder(self) -> Path:
        """The folder of the tokens that are learned."""
        assert self.tokens is not None
        return self.tokens

    @property
    def is_of_images(self) -> bool:
        return False

    @property
    def seconds(self) -> float | None:
        """The maximum training time; None: no limit."""
        minutes = (self.minutes or 0) + (self.more_minutes or 0)
        return 60 * minutes + 3600 * (self.hours or 0) or None

    @property
    def warm_up(self) -> int:
        """Steps of learning-rate warm-up; fewer for a short run."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        limit = self.max_warm_up
        return limit if self.steps is None else min(limit, int(self.steps * WARM_UP_SHARE))

    @property
    def compiles(self) -> bool:
        """True if compiling the loss is requested, possible, and there is time for it."""
        is_long = self.seconds is None or self.seconds >= MIN_COMPILED_S
        return self.compile and is_long and find_compiler() is not None

    def length_of(self, clips: Any) -> int:
        """Return the tokens of a sequence of `TokenClips`: frames, and actions between them."""
        return self.frames * clips.slots_per_frame - clips.codec.num_tokens

    def batch_of(self, clips: Any) -> int:
        """Return the sequences per step and process."""
        return self.batch_size or max(1, round(BATCH_TOKENS / self.length_of(clips)))

    def share_done(self, step: int, seconds: float, warm_up: int = 0) -> float:
        """Return the share of a run, without warm-up, done after these steps and seconds."""
        by_steps = 0.0 if self.steps is None else (step - warm_up) / (self.steps - warm_up)
        by_time = 0.0 if self.seconds is None else seconds / self.seconds
        return min(max(by_steps, by_time, 0.0), 1.0)

    def learning_rate_at(self, step: int, seconds: float = 0.0) -> float:
        """Warm up linearly, by steps or time, then follow a cosine to a tenth of the peak."""
        done, peak = self.share_done(step, seconds, self.warm_up), self.learning_rate
        by_time = 0.0 if self.warmup_steps is not None else done / WARM_UP_SHARE
        if step < self.warm_up and by_time < 1:
            return max(peak * (step + 1) / self.warm_up, peak * by_time)
        return peak * (0.55 + 0.45 * math.cos(math.pi * done))

    @property
    def frames_held(self) -> int:
        """Frames that the model's context must hold."""
        return self.window or self.frames

    @cached_property
    def mixture(self) -> dict[Strategy, float]:
        return parse_mixture(self.strategy)

    def purpose(self) -> dict[str, object]:
        """Return the purpose of a run; runs with different purposes are different runs."""
        names = ["context_frames", "frames"]
        names += ["window"] if self.window else []
        names += ["corrupt", "corrupt_with"] if self.corrupt else []
        strategies = spell_mixture(self.mixture)
        return {"strategies": strategies, **{n: getattr(self, n) for n in names}}


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train a world model on the folder of `diagd tokenize`; the result is a playable model folder.

    Without --steps it trains for 20 minutes, and sizes the model to that time.
    """

    tokens: Path  # folder from diagd tokenize, or of token shards
    # preset, such as mc-ar-128x3, mc-ar-320x6, mc-ar-42m; default: sized to the training time
    model: str | None = None
    init: str | None = None  # checkpoint folder with the initial weights; default: random ones
    # peak learning rate; decays along a cosine to a tenth. Use 3e-4 for mc-ar-42m and larger
    learning_rate: float = 3e-3
    # strategies drawn for each step, with weights: raster k=1:2 k=1,d=14; worlds play with k=1
    strategy: tuple[str, ...] = ("raster", "k=1")
    context_frames: int = 0  # frames at the start, in raster order, that are not learned

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model is not None and self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        super().__post_init__()

    @property
    def seconds(self) -> float | None:
        given = super().seconds
        return 60 * WORLD_MINUTES if given is None and self.steps is None else given


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """Finetune a model for diagonal decoding; the result is a model folder for `generate`."""

    # model to finetune: doom, or a checkpoint folder
    init: Annotated[str, tyro.conf.arg(aliases=["--model"])]
    # folder from diagd tokenize, or of token shards; with --images that of their tokens, by default
    # NAME-tokens beside them
    tokens: Path | None = None
    # folder of pictures for an image model, with texts in NAME.txt, metadata.jsonl or *.parquet; a
    # class is its folder's name or a label
    images: Path | None = None
    # share of the images learned without their text or class; default: 0.1, LlamaGen's, for a model
    # with guidance, else 0
    drop: float | None = None
    # strategies drawn for each step, with weights: raster k=1:2 k=1,d=14; one model learns all
    strategy: tuple[str, ...] = ("raster", "k=1", "k=2")
    context_frames: int = 1  # frames at the start, in raster order, that are not learned
    steps: int = 5000  # optimizer steps
    learning_rate: float = 1e-3  # peak learning rate; decays along a cosine to a tenth
    # train low-rank adapters of this rank, beside frozen weights: writes the folder of an adapter
    lora: int | None = None
    # train an embedding that is fed where rows start, alone or with --lora: k=1 means k=1/learnt
    stand_in: bool = False
    int8: bool = False  # keep the frozen weights in int8, for memory
    # recompute blocks in the backward pass: slower, less memory; default: if memory is short
    recompute: bool | None = None
    max_warm_up: ClassVar[int] = 100

    def __post_init__(self) -> None:
        check_at_least(self, lora=1)
        super().__post_init__()
        if self.int8 and not self.is_adapter:
            raise ValueError("int8 needs frozen weights: give --lora or --stand-in")
        if self.stand_in and not any(isinstance(one, Diagonal) for one in self.mixture):
            raise ValueError("stand_in needs diagonals among the strategies, such as k=1")
        if self.tokens is None and self.images is None:
            raise ValueError("give --tokens, or --images for an image model")
        if self.images is None and self.drop is not None:
            raise ValueError("drop is only for --images")
        given = [name for name in OF_CLIPS if getattr(self, name) != getattr(type(self), name)]
        if self.images is not None and given:
            raise ValueError(f"{given[0]} is for clips: leave it out with images")
        check_values(self, ("drop", self.drop is None or 0 <= self.drop < 1, "in [0, 1)"))

    @property
    def token_folder(self) -> Path:
        """The folder of the tokens that are learned."""
        beside = self.images and self.images.resolve()
        folder = self.tokens or (beside and beside.with_name(f"{beside.name}-tokens"))
        assert folder is not None
        return folder

    @property
    def is_of_images(self) -> bool:
        return self.images is not None

    @property
    def frames_held(self) -> int:
        return 1 if self.images else super().frames_held

    def length_of(self, clips: Any) -> int:
        return clips.length if self.images else super().length_of(clips)

    @property
    def is_adapter(self) -> bool:
        return self.lora is not None or self.stand_in

    @cached_property
    def mixture(self) -> dict[Strategy, float]:
        return {
            replace(one, row_start="learnt")
            if self.stand_in and isinstance(one, Diagonal) and one.row_start == "temporal"
            else one: weight
            for one, weight in parse_mixture(self.strategy).items()
        }

    def purpose(self) -> dict[str, object]:
        own = ("lora", "stand_in", "int8", "drop")
        given = {
            name: getattr(self, name) for name in own if getattr(self, name) not in (None, False)
        }
        if self.is_of_images:
            return {"init": self.init, **given, "strategies": spell_mixture(self.mixture)}
        return {"init": self.init, **given, **super().purpose()}


Axis = Literal["frame", "row", "column"]
ROW_STARTS: tuple[RowStart, ...] = ("temporal",)


@dataclass(frozen=True)
class TuneOptions:
    """Measure the loss of strategies on held-out clips; name the fastest one within a tolerance.

    Candidates have a schedule: k=1, k=2,d=28/predecessor, zipar=4. Raster is always included.
    """

    tokens: Path  # folder from diagd tokenize (its held-out part is used), or of token shards
    model: str = "doom"  # bundled model or checkpoint folder
    baseline: str | None = None  # model whose raster order is the reference; default: --model
    tolerance: float = 0.02  # maximum loss over raster order, in nats per token
    strategy: tuple[str, ...] = ()  # candidates by name; default: the diagonals below
    row_lag: RowLags = ()  # row lags of diagonals; default: 1, 2, 4, 8
    overlap: bool = False  # overlap frames, for actions known in advance
    row_start: tuple[RowStart, ...] = ROW_STARTS  # row starts to try; all cost nearly the same
    by: tuple[Axis, ...] = ()  # also report the gap by frame, row or column
    clips: int | None = None  # number of held-out clips; default: 16, or all
    frames: int | None = None  # frames per clip; default: as many as the model's context holds
    context_frames: int = 1  # frames of each clip that are given
    seed: int = 0  # seed of the position of a window in its clip
    device: Device = "cpu"  # run on cpu, cuda or cuda:1
    out: OutputFolder | None = None  # folder to write tune.json and plots to
    make_default: bool = False  # store the choice as the default strategy in the model's folder

    def __post_init__(self) -> None:
        check_at_least(self, tolerance=0, clips=1, context_frames=1)
        if self.make_default and self.model in available_models():
            raise ValueError(f"make_default needs your own model folder, got {self.model}")
        if not self.row_start:
            raise ValueError("row_start must not be empty")
        if self.strategy and (self.row_lag or self.overlap or self.row_start != ROW_STARTS):
            raise ValueError("row_lag, overlap and row_start must be left out with strategy")
        starts = (Diagonal(1, row_start=row_start) for row_start in self.row_start)
        for strategy in (*self.named, *map(Diagonal, self.row_lag), *starts):
            if not strategy.has_schedule:
                raise ValueError(f"strategy must have a schedule, got {strategy}")
            strategy.check()

    @cached_property
    def named(self) -> list[Strategy]:
        return parse_strategies(self.strategy)
